"""All places of a ring on one card: their blocks, put together, against dense attention; milliseconds of every block.

    python benchmarks/gpu/ring.py [--json] [--tokens 65536] [--places 2,4,8] [--limit seconds] [--tiny]

Every place is a thread that runs the cp_comm as it is (`runtime.attention.sharing.ring`,
`runtime.attention.sharing.gather`), one thread at a time, on a plane whose messages are copies on the card. So kernels,
merges, tiles and what goes home are those of a real ring; only the network is missing.

Part 1: two ragged sequences on several places, each cp_comm, each row of `runtime.attention.blocks` that takes bf16
here and one that takes float64: relative error of output and gradients against torch's attention in float64.

Part 2: one sequence, bf16, the best row: seconds of each sort of block, of the busiest place over the mean place, and
of all blocks over one block of the whole sequence (what cutting into blocks costs). The second run counts.

``--limit`` starts nothing new after so many seconds. ``--tiny`` tries all of it out without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from evenload.benchmarks.frame import Row, options, show
from evenload.benchmarks.gpu.card import (
    GROUPS,
    HEAD_DIM,
    HEADS,
    about,
    asked_for,
    attempted,
    device_here,
    half_on,
    named,
    relative_by_name,
)
from evenload.commands.tables.show import grid
from evenload.core.plan.step_plan import CpComm, MicroBatch, Slice
from evenload.core.plan.token_layout import attended
from evenload.runtime.attention.blocks import BLOCKS, BlockKernel, Inputs
from evenload.runtime.attention.sharing.gather import Gather
from evenload.runtime.attention.sharing.jobs import CpGroupJob, heads_of, jobs_of
from evenload.runtime.attention.sharing.ring import Ring
from evenload.runtime.attention.sharing.running_job import AttentionCall, RunningJob
from evenload.runtime.measure.busy import BusyClock
from evenload.runtime.world.plane import Pending, Plane
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ERROR_LENGTHS, TINY_LENGTHS = (1531, 517), (61, 18)
SHARED: tuple[tuple[CpComm, int, int], ...] = (
    *(("ring", 2, 1), ("ring", 3, 1), ("ring", 8, 1)),
    *(("all_gather", 3, 1), ("all_to_all", 3, 3), ("hybrid", 4, 2)),
)
"""(cp_comm, places, places that share heads)."""
PATIENCE_S = 60.0


class Tensors(NamedTuple):
    """[T, H, D] or, of keys and values, [T, G, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Results(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Mail:
    """Messages between the places; who holds the baton runs."""

    def __init__(self) -> None:
        self.baton = threading.Condition()
        self.letters: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.failure: BaseException | None = None


class OneCard(Plane):
    """A plane whose ranks are threads on one card."""

    def __init__(self, mail: Mail, places: int, rank: int) -> None:
        super().__init__(None, tuple(range(places)), rank)
        self._mail = mail

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int) -> Pending:
        """See `Plane.post`."""
        for peer, tensor in sends:
            self._mail.letters[self.rank, peer, tag].append(tensor.clone())
        self._mail.baton.notify_all()
        return Letters(self._mail, self.rank, receives, tag)


class Letters(Pending):
    """Messages that may not have been written yet; who waits for one passes the baton on."""

    def __init__(self, mail: Mail, rank: int, receives: Sequence[tuple[int, Tensor]], tag: int) -> None:
        super().__init__((), (), [(peer, tensor) for peer, tensor in receives if tensor.numel()])
        self._mail, self._rank, self._tag = mail, rank, tag

    def wait(self) -> dict[int, Tensor]:
        """See `Pending.wait`."""
        for peer, tensor in self._receives:
            letters = self._mail.letters[peer, self._rank, self._tag]
            while not letters:
                if not self._mail.baton.wait(PATIENCE_S) or self._mail.failure is not None:
                    raise RuntimeError(f"place {self._rank} waits for place {peer}") from self._mail.failure
            tensor.copy_(letters.popleft())
        return super().wait()


def together(places: int, run: Callable[[OneCard], None]) -> None:
    """Run all places; the first failure is raised."""
    mail = Mail()

    def at(place: int) -> None:
        with mail.baton, torch.no_grad():
            try:
                if mail.failure is None:
                    run(OneCard(mail, places, place))
            except BaseException as error:
                mail.failure = mail.failure or error
            finally:
                mail.baton.notify_all()

    threads = [threading.Thread(target=at, args=(place,)) for place in range(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if mail.failure is not None:
        raise mail.failure


def shared(
    tensors: Tensors,
    lengths: Sequence[int],
    cp_comm: CpComm,
    places: int,
    ulysses_degree: int,
    block_of: Callable[[int], BlockKernel],
) -> Results:
    """Attention of sequences laid end to end, and its gradients, each place computing its part with its block."""
    pieces = tuple(Slice(i, 0, n) for i, n in enumerate(lengths))
    micro_batch = MicroBatch(pieces, tuple(range(places)), cp_comm=cp_comm, ulysses_degree=ulysses_degree)
    (job,) = jobs_of(micro_batch, 0, lambda piece: False, lambda piece, rank: 0)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    results = Results(*(torch.zeros_like(t) for t in (tensors.q, *tensors[:3])))

    def run(plane: OneCard) -> None:
        own = [p for piece in pieces for p in attended(piece, job.cp_group, plane.rank)]
        rows = torch.cat([torch.arange(p.start, p.stop) + starts[p.sequence] for p in own]).to(tensors.q.device)
        compute(tensors, results, rows, plane, job, cp_comm, block_of(plane.rank))

    together(places, run)
    return results


def compute(
    tensors: Tensors,
    results: Results,
    rows: Tensor,
    plane: OneCard,
    job: CpGroupJob,
    cp_comm: CpComm,
    block: BlockKernel,
) -> None:
    """One place's part of the results: tokens ``rows`` and some of the heads."""
    call = AttentionCall(
        plane=plane,
        store=None,
        layer=0,
        scale=HEAD_DIM**-0.5,
        block=block,
        frozen=False,
        num_heads=(HEADS, GROUPS),
        cp_comm=cp_comm,
        routed=False,
    )
    heads = heads_of(
        plane.rank % job.cp_group.ulysses_degree, job.cp_group.ulysses_degree, tensors.q.shape[1], tensors.k.shape[1]
    )
    q, k, v, dout = (
        tensor[rows][:, part].contiguous()
        for tensor, part in zip(tensors, (heads.queries, heads.keys, heads.keys, heads.queries), strict=True)
    )
    kind: type[RunningJob] = Gather if cp_comm == "all_gather" else Ring
    forward = kind(call, job, heads, q, (k, v))
    for _ in forward.forward():
        pass
    backward = kind.restored(call, job, heads, forward.saved)
    for _ in backward.backward(dout):
        pass
    dq, dk, dv = backward.grads
    parts = ((forward.out_NHD, heads.queries), (dq, heads.queries), (dk, heads.keys), (dv, heads.keys))
    for result, (part, columns) in zip(results, parts, strict=True):
        # Several places give a part of the gradient of a key head that they share.
        result[:, columns].index_add_(0, rows, part.to(result.dtype))


def random_tensors(tokens: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    generator = torch.Generator().manual_seed(tokens)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    return Tensors(*(torch.randn(tokens, h, HEAD_DIM, generator=generator).to(device, dtype) for h in heads))


def dense(tensors: Tensors, lengths: Sequence[int]) -> Results:
    """By torch, in float64, sequence by sequence."""
    rows = []
    for parts in zip(*(torch.split(t.double(), list(lengths)) for t in tensors), strict=True):
        leaves = [t.detach().requires_grad_() for t in parts[:3]]
        q, k, v = (t.transpose(0, 1)[None] for t in leaves)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=HEAD_DIM**-0.5, enable_gqa=True)
        out = out[0].transpose(0, 1)
        rows.append((out.detach(), *torch.autograd.grad(out, leaves, parts[3])))
    return Results(*(torch.cat(row) for row in zip(*rows, strict=True)))


def errors(lengths: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> list[Row]:
    """A row for each cp_comm, number of places, kernel and dtype; what fails is recorded."""
    rows: list[Row] = []
    for dtype in dtypes:
        tensors = random_tensors(sum(lengths), dtype, device)
        want = dense(tensors, lengths)
        for block, (cp_comm, places, ulysses_degree) in product(usable(dtype, device), SHARED):
            row = {"kernel": block.name, "dtype": named(dtype), "engine": cp_comm, "places": places}
            run = partial(shared, tensors, lengths, cp_comm, places, ulysses_degree, partial(_same, block))
            rows.append(
                attempted(row, lambda run=run, want=want: {"error": relative_by_name(Results._fields, run(), want)})
            )
    return rows


def usable(dtype: torch.dtype, device: torch.device) -> list[BlockKernel]:
    """The rows that take a dtype here; of float64 one is enough."""
    candidates = [b for b in BLOCKS if b.supports(dtype, device, HEAD_DIM) and b.available()]
    return candidates[:1] if dtype == torch.float64 else candidates


def _same(block: BlockKernel, place: int) -> BlockKernel:
    return block


class Timed(NamedTuple):
    """One call of a block."""

    kind: str
    queries: int
    keys: int
    causal: bool
    ms: float

    @property
    def tflops(self) -> float:
        """Two multiply-adds a hidden unit and pair forward, 2.5 times that backward; per second."""
        pairs = self.queries * self.keys - self.causal * self.queries * (self.queries - 1) / 2
        return {"F": 1.0, "B": 2.5}[self.kind] * 4 * HEADS * HEAD_DIM * pairs / self.ms / 1e9


class Clocked:
    """A block whose calls are timed."""

    def __init__(self, block: BlockKernel, device: torch.device) -> None:
        self._clock, self._block = BusyClock(device, record=True), block
        self._calls: list[tuple[int, int, bool]] = []

    @property
    def block(self) -> BlockKernel:
        return replace(self._block, forward=self._forward, backward=self._backward)

    def read(self) -> list[Timed]:
        """Every call so far. Waits for the device."""
        spans = self._clock.spans(0, 0)
        return [
            Timed(span.kind, *call, 1e3 * (span.end_s - span.start_s))
            for span, call in zip(spans, self._calls, strict=True)
        ]

    def _note(self, x: Inputs) -> None:
        self._calls.append((len(x.q_NHD), len(x.k_MGD), x.causal))

    def _forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        self._note(x)
        with self._clock.running("F"):
            return self._block.forward(x)

    def _backward(self, dout: Tensor, x: Inputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._note(x)
        with self._clock.running("B"):
            return self._block.backward(dout, x, out, lse)


def times(tokens: int, places: int, block: BlockKernel, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Every sort of block in a ring, and what they take together."""
    tensors = random_tensors(tokens, dtype, device)
    whole: dict[str, Timed] = {}
    timings: list[list[Timed]] = []
    for _ in range(2):  # the first run pays for what is made once
        whole = {t.kind: t for run in measured(tensors, 1, block, device) for t in run}
        timings = measured(tensors, places, block, device)
    sorts: dict[tuple[Any, ...], list[Timed]] = {}
    for t in (t for run in timings for t in run):
        sorts.setdefault(t[:4], []).append(t)
    medians = [ts[0]._replace(ms=statistics.median(t.ms for t in ts)) for ts in sorts.values()]
    of_places = {kind: [sum(t.ms for t in run if t.kind == kind) for run in timings] for kind in "FB"}
    return {
        "tokens": tokens,
        "places": places,
        "kernel": block.name,
        "blocks": [
            {**t._asdict(), "calls": len(ts), "tflops": t.tflops} for t, ts in zip(medians, sorts.values(), strict=True)
        ],
        "whole": {kind: {"ms": t.ms, "tflops": t.tflops} for kind, t in whole.items()},
        "busiest_over_mean": {kind: max(ms) / statistics.mean(ms) for kind, ms in of_places.items()},
        "all_over_whole": {kind: sum(ms) / whole[kind].ms for kind, ms in of_places.items()},
    }


def measured(tensors: Tensors, places: int, block: BlockKernel, device: torch.device) -> list[list[Timed]]:
    """The calls of each place of a ring."""
    clocked = [Clocked(block, device) for _ in range(places)]
    shared(tensors, [len(tensors.q)], "ring", places, 1, lambda place: clocked[place].block)
    return [one.read() for one in clocked]


def benchmark(asked: argparse.Namespace) -> Row:
    """Both parts."""
    until, device = time.monotonic() + asked.limit, device_here()
    half = half_on(device)
    rows = errors(TINY_LENGTHS if asked.tiny else ERROR_LENGTHS, (torch.float64, half), device)
    rings = [
        attempted(
            {"tokens": n, "places": g}, lambda n=n, g=g: times(n, g, usable(half, device)[0], half, device), until
        )
        for n, g in product(asked.tokens, asked.places)
    ]
    heads = [HEADS, GROUPS, HEAD_DIM]
    return {**about(device), "dtype": named(half), "heads": heads, "errors": rows, "rings": rings}


def table(result: dict[str, Any]) -> Any:
    """Both parts below each other."""
    rows: list[tuple[Any, ...]] = []
    for r in result["errors"]:
        error = r.get("failed") or f"{max(r['error'].values()):.1e}"
        rows.append((f"{r['engine']} on {r['places']}", r["kernel"], r["dtype"], "", "", error))
    for r in result["rings"]:
        name = f"{r['tokens']} tokens on {r['places']}"
        if "failed" in r:
            rows.append((name, "", "", "", "", r["failed"]))
            continue
        for b in r["blocks"]:
            sort = f"{b['kind']} {b['queries']} x {b['keys']}{' causal' if b['causal'] else ''}"
            rows.append((name, r["kernel"], sort, b["ms"], b["tflops"], ""))
        for kind, whole in r["whole"].items():
            rows.append((name, r["kernel"], f"{kind} whole", whole["ms"], whole["tflops"], ""))
            more = f"busiest/mean {r['busiest_over_mean'][kind]:.3f}, all/whole {r['all_over_whole'][kind]:.3f}"
            rows.append((name, r["kernel"], f"{kind} all places", "", "", more))
    head = ("ring", "kernel", "", "ms", "TFLOP/s", "largest error")
    return grid(f"a ring on one card: {result['device']}, {result['dtype']}, torch {result['torch']}", head, rows)


if __name__ == "__main__":
    asked = asked_for(options(__doc__, tokens=[65536], places=[2, 4, 8], limit=float("inf"), tiny=False))
    show(benchmark(asked), asked, table)
