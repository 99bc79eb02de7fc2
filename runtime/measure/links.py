"""Times what ranks send each other, and fits latency and bandwidth of a `Link` to it.

Every collective is timed over sizes from 1 KiB up, in rows of some calls right after one another; of a few rows the
least counts, and of the ranks in it the slowest. A link has two numbers, so a collective that an implementation does
better or worse than its formula (`core.machine.cluster`) shows in `LinkFit.errors`, one a collective.

On CUDA events on the current stream are timed, elsewhere the wall. All functions are collective over the whole world.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...core.costs.costs import solve
from ...core.machine.cluster import Link
from ..world.agreement import Group, gather_bytes
from .busy import cuda_event

SIZES = tuple(1024 * 4**k for k in range(9))
"""Bytes of the largest tensor that a rank holds in a call: 1 KiB .. 64 MiB."""
ROWS = 4
ROW_S = 0.01
"""A row holds as many calls as take about this long, `MOST_CALLS` at most."""
MOST_CALLS = 20
ROUNDS = 20
"""Of reweighted least squares."""


class Timing(NamedTuple):
    """One collective over one size."""

    collective: str
    num_bytes: float
    """As `Link` counts them for this collective."""
    num_ranks: int
    seconds: float


class LinkFit(NamedTuple):
    """A link and how far its formulas are from what was measured."""

    link: Link
    errors: dict[str, float]
    """Mean absolute relative error by collective."""
    timings: tuple[Timing, ...]


class Collective(NamedTuple):
    """How a collective is called, and what `Link` says it costs."""

    call: Callable[[Tensor, int, Group], None]
    """Over a buffer, by the place in the group."""
    formula: str
    """The method of `Link` that gives its seconds."""
    gathers: bool = False
    """`Link` counts the bytes that one rank brings to the buffer, not all of it."""
    hops: int = 1
    """How often a call does it."""

    def counted(self, num_bytes: int, num_ranks: int) -> float:
        """Bytes of the buffer as `Link` counts them."""
        return num_bytes / num_ranks if self.gathers else float(num_bytes)

    def factors(self, num_bytes: float, num_ranks: int) -> tuple[float, float]:
        """What latency and 1 / bandwidth are multiplied by for so many counted bytes, read off the formula itself."""

        def at(latency_s: float, bytes_per_s: float) -> float:
            formula = getattr(Link(latency_s=latency_s, bytes_per_s=bytes_per_s), self.formula)
            return float(formula(num_bytes) if self.formula == "send_s" else formula(num_bytes, num_ranks))

        transfer = at(0.0, 1.0)
        return at(1.0, 1.0) - transfer, transfer


def _all_reduce(buffer: Tensor, place: int, group: Group) -> None:
    dist.all_reduce(buffer, group=group)


def _all_gather(buffer: Tensor, place: int, group: Group) -> None:
    parts = list(buffer.chunk(dist.get_world_size(group)))
    dist.all_gather(parts, parts[place].clone(), group=group)


def _reduce_scatter(buffer: Tensor, place: int, group: Group) -> None:
    parts = list(buffer.chunk(dist.get_world_size(group)))
    dist.reduce_scatter(torch.empty_like(parts[place]), parts, group=group)


def _all_to_all(buffer: Tensor, place: int, group: Group) -> None:
    dist.all_to_all_single(torch.empty_like(buffer), buffer, group=group)


def _send(buffer: Tensor, place: int, group: Group) -> None:
    """To the neighbour and back: two hops; the last of an odd number of ranks looks on."""
    other = place ^ 1
    if other >= dist.get_world_size(group):
        return
    peer = dist.get_process_group_ranks(group or dist.group.WORLD)[other]
    for sends in (place < other, place > other):
        if sends:
            dist.send(buffer, peer, group=group)
        else:
            dist.recv(buffer, peer, group=group)


COLLECTIVES = {
    "all_reduce": Collective(_all_reduce, "all_reduce_s"),
    "all_gather": Collective(_all_gather, "all_gather_s", gathers=True),
    "reduce_scatter": Collective(_reduce_scatter, "all_gather_s", gathers=True),
    "all_to_all": Collective(_all_to_all, "all_to_all_s"),
    "send": Collective(_send, "send_s", hops=2),
}


def time_links(device: torch.device, group: Group = None, *, budget_s: float = 10.0) -> tuple[Timing, ...]:
    """Seconds of each collective that the backend has, over `SIZES` until a collective's share of the time is spent."""
    timings: list[Timing] = []
    num_ranks = dist.get_world_size(group)
    for name, collective in COLLECTIVES.items():
        if not _has(collective, device, group):
            continue
        left_s = budget_s / len(COLLECTIVES)
        for size in SIZES:
            start = time.perf_counter()
            buffer = torch.zeros(size // 4 // num_ranks * num_ranks, dtype=torch.float32, device=device)
            if not len(buffer):
                continue
            seconds = _least(collective.call, buffer, device, group) / collective.hops
            timings.append(Timing(name, collective.counted(buffer.nbytes, num_ranks), num_ranks, seconds))
            left_s -= _slowest(time.perf_counter() - start, group)
            if left_s < 4 * _slowest(time.perf_counter() - start, group):  # the next size is four times as large
                break
    return tuple(timings)


def fit_link(timings: Sequence[Timing]) -> LinkFit:
    """The link whose logarithms of seconds are nearest to those measured, each collective with the same weight.

    Least squares of relative errors would follow the fastest collective: being too low by any factor costs 1 at most.
    """
    factors = np.array([COLLECTIVES[t.collective].factors(t.num_bytes, t.num_ranks) for t in timings])
    seconds = np.array([t.seconds for t in timings])
    counts = Counter(t.collective for t in timings)
    weights = np.array([counts[t.collective] ** 0.5 for t in timings])
    predicted_s = seconds
    for _ in range(ROUNDS):
        # (x - y) / sqrt(x y) is 2 sinh(log(x / y) / 2): the logarithm's difference to second order.
        (latency_s, inverse), _ = solve(factors, seconds, np.sqrt(seconds * predicted_s) * weights)
        predicted_s = np.maximum(factors @ [latency_s, inverse], 1e-12)
    errors: dict[str, list[float]] = defaultdict(list)
    for timing, predicted in zip(timings, predicted_s.tolist(), strict=True):
        errors[timing.collective].append(abs(predicted / timing.seconds - 1.0))
    link = Link(latency_s=latency_s, bytes_per_s=1.0 / max(inverse, 1e-15))
    return LinkFit(link, {name: float(np.mean(row)) for name, row in errors.items()}, tuple(timings))


def measure_links(device: torch.device, ranks_per_node: int, *, budget_s: float = 10.0) -> dict[str, LinkFit]:
    """``intra``: among the ranks of a node (all nodes at once); ``inter``: among all, where there are several nodes."""
    world = dist.get_world_size()
    spans_nodes = world > ranks_per_node
    fits: dict[str, LinkFit] = {}
    if ranks_per_node > 1:
        group = dist.new_subgroups(ranks_per_node)[0] if spans_nodes else None  # type: ignore[no-untyped-call]
        fits["intra"] = fit_link(time_links(device, group, budget_s=budget_s))
        if group is not None:
            dist.destroy_process_group(group)
    if spans_nodes:
        fits["inter"] = fit_link(time_links(device, None, budget_s=budget_s))
    return fits


def _has(collective: Collective, device: torch.device, group: Group) -> bool:
    """Whether the backend knows a collective; warms it up where it does."""
    buffer = torch.zeros(dist.get_world_size(group), dtype=torch.float32, device=device)
    try:
        collective.call(buffer, dist.get_rank(group), group)
        return True
    except (RuntimeError, NotImplementedError) as error:
        if "support" in str(error) or "implement" in str(error):
            return False
        raise


def _least(call: Callable[[Tensor, int, Group], None], buffer: Tensor, device: torch.device, group: Group) -> float:
    """The fewest seconds that one call takes, over several rows of calls."""
    place, num_calls, least = dist.get_rank(group), 1, float("inf")
    for row in range(ROWS + 1):
        dist.barrier(group)
        clock = _Clock(device)
        for _ in range(num_calls):
            call(buffer, place, group)
        each_s = _slowest(clock.stop(), group) / num_calls
        if row == 0:  # warms up, and says how many calls make a row
            num_calls = int(min(MOST_CALLS, max(1, ROW_S / each_s)))
        else:
            least = min(least, each_s)
    return least


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self._start: Any = cuda_event() if device.type == "cuda" else time.perf_counter()

    def stop(self) -> float:
        if isinstance(self._start, float):
            return time.perf_counter() - self._start
        end = cuda_event()
        end.synchronize()
        return float(self._start.elapsed_time(end)) / 1e3


def _slowest(seconds: float, group: Group) -> float:
    rows = gather_bytes(np.float64(seconds).tobytes(), group)
    return max(float(np.frombuffer(row)[0]) for row in rows)
