"""Ask all ranks before acting: do they hold the same plan, did it work everywhere?

A rank that runs another plan than its peers does not crash: it waits in a collective for ever or mixes wrong tensors.
A hash of 16 bytes per rank, gathered before use, costs 1.2 to 1.4 ms between 2 gloo ranks and 2.1 to 2.3 ms between 4
(measured on 2 shared cores) and turns that into one message. Without a process group every function answers for a
world of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import groupby
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...core.aliases import Ranks
from ...core.errors import EvenloadError, RankError
from ..attributes import with_attributes
from .replicas import JobGroup, job_group

Group = dist.ProcessGroup | None
Scope = Group | Literal["job"]
"""Who takes part: a group; None: the world, which is this replica's where a job has several; job: all its replicas."""
Value = TypeVar("Value")

before_first: Callable[[], None] | None = None
"""What this process does before it first asks the others; it may raise, and is then done again the next time."""


def _begin() -> None:
    global before_first
    if before_first is not None:
        before_first()
        before_first = None


def _narrowed(scope: Scope) -> Group | JobGroup:
    return (job_group() or None) if scope == "job" else scope


def gather_bytes(payload: bytes, group: Scope = None) -> list[bytes]:
    """The payload of every rank of `group`, in group order. All ranks must give the same number of bytes."""
    if not dist.is_initialized():
        return [payload]
    _begin()
    narrowed = _narrowed(group)
    if isinstance(narrowed, JobGroup):
        return narrowed.gather_bytes(payload)
    group = on_host(narrowed)
    own = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    everyone = torch.empty(dist.get_world_size(group), len(payload), dtype=torch.uint8)
    dist.all_gather(list(everyone.unbind()), own, group=group)
    return [row.tobytes() for row in everyone.numpy()]


def agree(digest: bytes, what: str, step: int, group: Scope = None) -> None:
    """Return if every rank of `group` holds the same digest.

    Raises RankError: on every rank, with the same text; it names the ranks that differ from the majority, or all sides
    where there is none. `what` is a plural: "plans", "checkpoints".
    """
    digests = gather_bytes(digest, group)
    if len(set(digests)) == 1:
        return
    sides = Counter(digests).most_common()
    common, votes = sides[0]
    if 2 * votes > len(digests):
        odd = [rank for rank, d in enumerate(digests) if d != common]
        who = f"{name_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from the other {votes}"
    else:
        who = "no side has a majority"
    holders = "; ".join(
        f"{name_ranks(r for r, d in enumerate(digests) if d == side)}: {side.hex()[:12]}" for side, _ in sides[:8]
    )
    raise RankError(
        f"step {step}: the ranks hold different {what}: {who}",
        holders,
        "give every rank the same recipe, data files and evenload version (`evenload doctor` on each host shows them)",
    )


def first_error(error: str | None, group: Scope = None) -> list[tuple[int, str]]:
    """(rank, error) of every rank where something failed, lowest rank first; empty if it worked. Collective."""
    return [(rank, e) for rank, e in enumerate(everyone(error, group)) if e is not None]


def rank_and_size() -> tuple[int, int]:
    """(rank, size) of this process in the world."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def everyone(value: Value, group: Scope = None) -> list[Value]:
    """The value of every rank of `group`, by rank. Collective."""
    if not dist.is_initialized():
        return [value]
    _begin()
    narrowed = _narrowed(group)
    if isinstance(narrowed, JobGroup):
        return narrowed.everyone(value)
    values = [value] * dist.get_world_size(narrowed)
    dist.all_gather_object(values, value, group=on_host(narrowed))
    return values


def all_or_none(work: Callable[[], Value], group: Scope = None) -> Value:
    """What ``work`` gives on this rank; an EvenloadError of one rank is raised on all of them. Collective."""
    error: EvenloadError | None = None
    result: Any = None
    try:
        result = work()
    except EvenloadError as caught:
        error = caught
    for refusal in filter(None, everyone(error, group)):
        raise refusal
    return result  # type: ignore[no-any-return]


def rows_of_all(own: Iterable[int]) -> list[Ranks]:
    """The rows into which the world is divided, from each rank's own row of world ranks. Collective."""
    return sorted(set(everyone(tuple(own))))


def from_first(work: Callable[[], Value], group: Scope = None) -> Value:
    """What rank 0 computes, on every rank; an error there is raised on all of them. Collective; ``group``: of all."""
    result: Any = None
    error: EvenloadError | None = None
    narrowed = _narrowed(group)
    if (narrowed.rank if isinstance(narrowed, JobGroup) else rank_and_size()[0]) == 0:
        try:
            result = work()
        except EvenloadError as caught:
            error = caught
        except Exception as caught:
            error = RankError(f"rank 0 failed: {type(caught).__name__}: {caught}")
    outcome = [result, error]
    if isinstance(narrowed, JobGroup):
        outcome = everyone(outcome, "job")[0]
    elif dist.is_initialized():
        _begin()
        dist.broadcast_object_list(outcome, src=0, group=on_host(narrowed))
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]  # type: ignore[no-any-return]


_on_host: dict[tuple[Group, Ranks], dist.ProcessGroup] = {}
"""Groups on the host by their world and its ranks."""


def on_host(group: Group = None) -> Group:
    """The group, or where it carries CUDA's tensors alone one of the same ranks over gloo. Collective the first time.

    What ranks tell each other must not wait for what their devices compute, nor a device for it. Raises RankError where
    gloo does not reach the others.
    """
    if "cpu:" in dist.get_backend_config(group):
        return group
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    key = dist.group.WORLD, ranks
    if key not in _on_host:
        # Torch names a group that its members alone make by how many groups each is in: ranks that are in unequally
        # many would wait for each other under unlike names.
        with with_attributes(distributed_c10d, _hash_ranks_to_str=lambda _: f"evenload on host {ranks}"):
            try:
                _on_host[key] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            except RuntimeError as error:
                what = "ranks do not reach each other over gloo, by which they compare their plans"
                raise RankError(what, str(error), "set GLOO_SOCKET_IFNAME to the network of the nodes") from error
    return _on_host[key]


def wire_device(group: Group = None) -> torch.device:
    """Where a small tensor must lie to be sent through `group`: the CPU unless its backend is for CUDA alone."""
    config = dist.get_backend_config(group)
    return torch.device("cpu" if "cpu:" in config else f"cuda:{torch.cuda.current_device()}")


def time_limit() -> timedelta:
    """After which a collective of the job fails. A group that is made without it has torch's own, by which NCCL would
    end a job that may take longer."""
    return distributed_c10d._get_default_group()._get_backend(wire_device()).options._timeout


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 2`` or ``ranks 0-3, 7``."""
    rows = groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])
    runs = [(members[0], members[-1]) for _, row in rows if (members := [rank for _, rank in row])]
    shown = [str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs[:20]]
    more = ", ..." if len(runs) > 20 else ""
    many = len(runs) > 1 or (bool(runs) and runs[0][0] != runs[0][1])
    return f"rank{'s' if many else ''} {', '.join(shown)}{more}"
