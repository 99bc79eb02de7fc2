"""How the tokens of a shared micro-batch are dealt to its ranks; pure functions of the micro-batch.

Two layouts. In the *attention layout* a rank of a sequence's CP group (the n ranks that share it) stands at place
p = (j, i), group j of g = n / u and head share i of u ranks; u is 1 for a ring and n for all-to-all:

    group j attends for chunks j and 2g - 1 - j of the slice, cut into 2g nearly equal chunks ("zig-zag": under a causal
    mask all groups then have equally many pairs), with the i-th part of the heads

In the *token layout*, that of all other modules, a rank has every head of its own tokens: the i-th of u nearly equal
runs of its group's tokens, so for u = 1 both layouts are one. With `MicroBatch.remap` tokens are further moved from
ranks with many to ranks with few until all counts are equal; queries, keys and values then travel to the attention
layout and the output back (the remap layer of Zeppelin, arXiv 2509.21841).
"""

from __future__ import annotations

from collections import deque
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..aliases import Floats, Ranks
from .step_plan import MicroBatch, Slice, StepPlan

Pieces = tuple[Slice, ...]


class CpGroup(NamedTuple):
    """Where a slice is attended for."""

    ranks: Ranks
    """In the order of their places."""
    ulysses_degree: int
    """Neighbouring places that share heads: 1 in a ring or an all-gather, all in an all-to-all."""

    @property
    def groups(self) -> int:
        return len(self.ranks) // self.ulysses_degree


def cp_group_of(micro_batch: MicroBatch, number: int) -> CpGroup:
    """The CP group of a micro-batch's slice by its place in ``slices``."""
    ranks = micro_batch.cp_groups[number] if micro_batch.cp_groups else micro_batch.ranks
    return CpGroup(ranks, _ulysses_degree(micro_batch, len(ranks)))


def _ulysses_degree(micro_batch: MicroBatch, degree: int) -> int:
    """Ranks that share heads in a CP group of so many ranks."""
    if degree == 1:
        return 1
    return {"all_to_all": degree, "hybrid": micro_batch.ulysses_degree}.get(micro_batch.cp_comm, 1)


def attended(piece: Slice, cp_group: CpGroup, place: int) -> Pieces:
    """Tokens that a place of a CP group attends for: up to two pieces, ascending."""
    length, chunks, group = piece.length, 2 * cp_group.groups, place // cp_group.ulysses_degree
    bounds = ((c * length // chunks, (c + 1) * length // chunks) for c in (group, chunks - 1 - group))
    return _joined(Slice(piece.sequence, piece.start + a, piece.start + b) for a, b in bounds)


def dealt(piece: Slice, cp_group: CpGroup, place: int) -> Pieces:
    """Tokens of a slice that a place of its CP group has in the token layout, before any remap."""
    pieces = attended(piece, cp_group, place)
    total, share = sum(p.length for p in pieces), place % cp_group.ulysses_degree
    return _run(pieces, share * total // cp_group.ulysses_degree, (share + 1) * total // cp_group.ulysses_degree)


def layout_of(micro_batch: MicroBatch, node_ranks: int = 0) -> dict[int, Pieces]:
    """The token layout: the pieces of every rank of a micro-batch, in the order in which it holds them.

    ``node_ranks``: plane ranks of a node, 0 where all are in one; a remap moves tokens inside a node first.
    """
    held: dict[int, list[Slice]] = {rank: [] for rank in micro_batch.ranks}
    for number, piece in enumerate(micro_batch.slices):
        cp_group = cp_group_of(micro_batch, number)
        for place, rank in enumerate(cp_group.ranks):
            held[rank] += dealt(piece, cp_group, place)
    if micro_batch.remap:
        return _evened(held, node_ranks)
    return {rank: tuple(pieces) for rank, pieces in held.items()}


def tokens_of_ranks(micro_batch: MicroBatch) -> dict[int, int]:
    """Tokens of every rank in the token layout. Static context parallelism, which pads, counts as even."""
    ranks, slots = micro_batch.ranks, micro_batch.num_padded_tokens
    if len(ranks) == 1:
        return {ranks[0]: slots}
    if micro_batch.remap or not micro_batch.cp_comm:
        return {rank: slots // len(ranks) + (i < slots % len(ranks)) for i, rank in enumerate(ranks)}
    counts = dict.fromkeys(ranks, 0)
    shared: dict[int, tuple[list[int], list[Ranks]]] = {}
    for s, ranks_of in zip(micro_batch.slices, micro_batch.ranks_of_slices, strict=True):
        if len(ranks_of) == 1:
            counts[ranks_of[0]] += s.stop - s.start
        else:
            lengths, cp_groups = shared.setdefault(len(ranks_of), ([], []))
            lengths.append(s.stop - s.start)
            cp_groups.append(ranks_of)
    for degree, (lengths, cp_groups) in shared.items():
        tokens = _tokens_of_places(np.array(lengths), degree, _ulysses_degree(micro_batch, degree))
        if not micro_batch.cp_groups:
            return dict(zip(ranks, tokens.sum(axis=0).tolist(), strict=True))
        for cp_group, row in zip(cp_groups, tokens.tolist(), strict=True):
            for rank, count in zip(cp_group, row, strict=True):
                counts[rank] += count
    return counts


def token_counts(micro_batch: MicroBatch) -> Floats:
    """`tokens_of_ranks`, in the order of the ranks: float64 [ranks]."""
    return np.fromiter(tokens_of_ranks(micro_batch).values(), dtype=np.float64)


def _tokens_of_places(lengths: npt.NDArray[np.int64], degree: int, ulysses_degree: int) -> npt.NDArray[np.int64]:
    """How many tokens `dealt` gives to each place, for slices of these lengths [S]: int64 [S, degree]."""
    chunks, n, c = 2 * (degree // ulysses_degree), lengths[:, None], np.arange(degree // ulysses_degree)
    of_group = (c + 1) * n // chunks - c * n // chunks + (chunks - c) * n // chunks - (chunks - 1 - c) * n // chunks
    i, shared = np.arange(ulysses_degree), of_group[:, :, None]
    tokens: npt.NDArray[np.int64] = (i + 1) * shared // ulysses_degree - i * shared // ulysses_degree
    return tokens.reshape(len(lengths), degree)


def _run(pieces: Pieces, first: int, end: int) -> Pieces:
    """Tokens first .. end-1 of pieces laid end to end."""
    parts, at = [], 0
    for p in pieces:
        a, b = max(first - at, 0), min(end - at, p.length)
        if a < b:
            parts.append(Slice(p.sequence, p.start + a, p.start + b))
        at += p.length
    return tuple(parts)


def _joined(pieces: object) -> Pieces:
    joined: list[Slice] = []
    for p in pieces:  # type: ignore[attr-defined]
        if joined and joined[-1].stop == p.start and p.length:
            joined[-1] = Slice(p.sequence, joined[-1].start, p.stop)
        elif p.length:
            joined.append(p)
    return tuple(joined)


def _evened(held: dict[int, list[Slice]], node_ranks: int) -> dict[int, Pieces]:
    """Surplus tokens, the last ones of a rank, to ranks with fewer; inside a node first, in the order of ranks."""
    total, count = sum(p.length for pieces in held.values() for p in pieces), len(held)
    want = {rank: total // count + (i < total % count) for i, rank in enumerate(held)}
    have = {rank: sum(p.length for p in pieces) for rank, pieces in held.items()}
    kept = {rank: list(_run(tuple(pieces), 0, min(have[rank], want[rank]))) for rank, pieces in held.items()}
    spare = {rank: deque(_run(tuple(pieces), want[rank], have[rank])) for rank, pieces in held.items()}
    order = sorted(held)
    nodes = [list(node) for _, node in groupby(order, key=lambda rank: rank // node_ranks if node_ranks else 0)]
    for ranks in (*nodes, order):
        givers = deque(rank for rank in ranks if spare[rank])
        for taker in ranks:
            missing = want[taker] - sum(p.length for p in kept[taker])
            while missing > 0 and givers:
                p = spare[givers[0]].popleft()
                taken = _run((p,), 0, missing)[0]
                kept[taker].append(taken)
                missing -= taken.length
                if taken.length < p.length:
                    spare[givers[0]].appendleft(Slice(p.sequence, taken.stop, p.stop))
                if not spare[givers[0]]:
                    givers.popleft()
    return {rank: tuple(pieces) for rank, pieces in kept.items()}


def ranks_of_samples(plan: StepPlan) -> list[set[int]]:
    """The ranks that compute some of each sample of the global batch, forward or backward."""
    ranks: list[set[int]] = [set() for _ in plan.lengths]
    for micro_batch in dict.fromkeys((*plan.micro_batches, *plan.backward)):
        alone = {micro_batch.ranks[0]: micro_batch.slices}
        pieces_of = alone if len(micro_batch.ranks) == 1 else layout_of(micro_batch, plan.limits.node_ranks)
        for rank, pieces in pieces_of.items():
            for piece in pieces:
                ranks[piece.sequence].add(rank)
    return ranks
