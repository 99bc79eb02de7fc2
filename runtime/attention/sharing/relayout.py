"""Queries, keys and values from the ranks that hold tokens to those that attend for them, and outputs back.

Shape legend: T = slots of the pack, N = tokens that a job attends for here, X = heads, D = head dimension.

Every pair of ranks sends one message each way, of the tokens and heads that one holds and the other attends for; the
part that stays is copied, and where all of it stays and nothing is to be reordered tensors are handed through as they
are. No autograd here: `shared` calls it in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ....core.aliases import Ranks
from ....core.plan.token_layout import Pieces, attended
from ...world.plane import FIRST_TAG, Plane
from ..copy_rows import sent
from .jobs import CpGroupJob, Heads, heads_of

Rows = slice | Tensor
_TAG = FIRST_TAG


class Overlap(NamedTuple):
    """What two ranks have in common of one job, seen from one of them."""

    job: int
    rows: Rows
    """In the pack on the side of tokens, in the job on the side of attention."""
    num_tokens: int
    heads: Heads
    """Of the rank that attends."""


class TensorSpec(NamedTuple):
    """A tensor of the pack [T, X, D] that travels, or will come back."""

    is_query: bool
    """Whether it has the heads of queries or those of keys."""
    num_heads: int
    dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, is_query: bool) -> TensorSpec:
        return cls(is_query, tensor.shape[1], tensor.shape[2], tensor.dtype)


class Relayout(NamedTuple):
    """Both sides of one rank."""

    plane: Plane
    num_padded_tokens: int
    holds: Mapping[int, tuple[Overlap, ...]]
    """Tokens held here, by the rank that attends for them."""
    attends: Mapping[int, tuple[Overlap, ...]]
    """Tokens attended for here, by the rank that holds them."""
    counts: Mapping[int, int]
    """Tokens of each job that this rank attends for."""
    heads: Mapping[int, Heads]
    """Of this rank in each of its jobs."""
    padded: bool
    """Whether some slots belong to no piece."""

    def to_attention(self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> dict[int, list[Tensor]]:
        """Tensors [T, X, D] of the pack to those of each of this rank's jobs, [N, own X, D]."""
        rank = self.plane.rank
        pairs = list(zip(tensors, specs, strict=True))
        sends = [
            (peer, _flat(tensor[part.rows, _span(part, spec)] for part in parts for tensor, spec in pairs))
            for peer, parts in self.holds.items()
            if peer != rank
        ]
        arrived = self._exchange(sends, self.attends, specs, tensors[0])
        done: dict[int, list[Tensor]] = {}
        here = {part.job: part for part in self.holds.get(rank, ())}
        there = {part.job: part for part in self.attends.get(rank, ())}
        for job, count in self.counts.items():
            if job in here and here[job].num_tokens == count and _in_order(there[job].rows):
                done[job] = [tensor[here[job].rows, _span(here[job], spec)] for tensor, spec in pairs]
                continue
            done[job] = []
            for tensor, spec in pairs:
                heads = self.heads[job].queries if spec.is_query else self.heads[job].keys
                done[job].append(tensor.new_empty(count, heads.stop - heads.start, spec.dim))
                if job in here:
                    done[job][-1][there[job].rows] = tensor[here[job].rows, heads]
        for peer, pieces in arrived.items():
            values = iter(pieces)
            for part in self.attends[peer]:
                for index in range(len(specs)):
                    done[part.job][index][part.rows] = next(values)
        return done

    def to_tokens(
        self, jobs: Mapping[int, Sequence[Tensor]], specs: Sequence[TensorSpec], like: Tensor
    ) -> list[Tensor]:
        """The way back from the tensors of each job, in the order of `specs`, to tensors of the pack on the device of
        ``like``; what comes from several ranks is summed."""
        rank = self.plane.rank
        if self._stays:
            (tensors,) = jobs.values()
            return [t.to(spec.dtype) for t, spec in zip(tensors, specs, strict=True)]
        sends = [
            (peer, _flat(jobs[p.job][i][p.rows].to(spec.dtype) for p in parts for i, spec in enumerate(specs)))
            for peer, parts in self.attends.items()
            if peer != rank
        ]
        arrived = self._exchange(sends, self.holds, specs, like)
        here = {part.job: part for part in self.holds.get(rank, ())}
        summed = [
            like.new_zeros(self.num_padded_tokens, spec.num_heads, spec.dim, dtype=_width(spec)) for spec in specs
        ]
        for part in self.attends.get(rank, ()):
            for total, tensor, spec in zip(summed, jobs[part.job], specs, strict=True):
                total[here[part.job].rows, _span(part, spec)] = tensor[part.rows].to(total.dtype)
        for peer in sorted(arrived):
            values = iter(arrived[peer])
            for part in self.holds[peer]:
                for total, spec in zip(summed, specs, strict=True):
                    total[part.rows, _span(part, spec)] += next(values)
        return [total.to(spec.dtype) for total, spec in zip(summed, specs, strict=True)]

    @property
    def _stays(self) -> bool:
        """Whether both layouts are the same, for one job of all heads and slots."""
        rank = self.plane.rank
        if len(self.counts) != 1 or self.padded or set(self.holds) | set(self.attends) != {rank}:
            return False
        part = self.holds[rank][0]
        return len(self.holds[rank]) == 1 and _in_order(part.rows) and _in_order(self.attends[rank][0].rows)

    def _exchange(
        self,
        sends: list[tuple[int, Tensor]],
        coming: Mapping[int, tuple[Overlap, ...]],
        specs: Sequence[TensorSpec],
        like: Tensor,
    ) -> dict[int, list[Tensor]]:
        """What comes from each other rank, part by part and tensor by tensor."""
        rank = self.plane.rank
        shapes = {
            peer: [_shape(part, spec) for part in parts for spec in specs]
            for peer, parts in coming.items()
            if peer != rank
        }
        sizes = {peer: [n * x * d for n, x, d in row] for peer, row in shapes.items()}
        receives = [(peer, like.new_empty(sum(row), dtype=specs[0].dtype)) for peer, row in sizes.items()]
        arrived = self.plane.post(sends, receives, _TAG).wait()
        return {
            peer: [t.view(shape) for t, shape in zip(torch.split(flat, sizes[peer]), shapes[peer], strict=True)]
            for peer, flat in arrived.items()
        }


def relayout_of(
    plane: Plane,
    pieces_of: Callable[[int], Pieces],
    holders: Ranks,
    starts: Sequence[int],
    num_padded_tokens: int,
    jobs: Sequence[CpGroupJob],
    num_heads: tuple[int, int],
    device: torch.device,
) -> Relayout:
    """Who sends what to whom in a shared micro-batch.

    Args:
        pieces_of: the tokens that a rank has in the token layout.
        holders: the ranks that may hold tokens of any job, where tokens are evened; empty: only those of a group
            exchange them.
        starts: the first slot of each piece of this rank in its pack.
        num_heads: of queries and of keys.
    """
    rank = plane.rank
    own = pieces_of(rank)
    holds: dict[int, list[Overlap]] = {}
    attends: dict[int, list[Overlap]] = {}
    counts: dict[int, int] = {}
    heads: dict[int, Heads] = {}
    for job in jobs:
        cp_group = job.cp_group
        for place, peer in enumerate(cp_group.ranks):
            first = place - place % cp_group.ulysses_degree
            group = cp_group.ranks[first : first + cp_group.ulysses_degree]
            if not holders and rank not in group:
                continue
            wanted = tuple(p for part in job.parts for p in attended(part.piece, cp_group, place))
            its_heads = heads_of(place % cp_group.ulysses_degree, cp_group.ulysses_degree, *num_heads)
            if runs := _common(own, starts, wanted):
                holds.setdefault(peer, []).append(_overlap(job, runs, 0, its_heads, device))
            if peer != rank:
                continue
            counts[job.number], heads[job.number] = sum(p.length for p in wanted), its_heads
            for holder in holders or group:
                theirs = own if holder == rank else pieces_of(holder)
                if runs := _common(theirs, [0] * len(theirs), wanted):
                    attends.setdefault(holder, []).append(_overlap(job, runs, 1, its_heads, device))
    padded = sum(p.length for p in own) < num_padded_tokens
    return Relayout(plane, num_padded_tokens, _by_peer(holds), _by_peer(attends), counts, heads, padded)


def _by_peer(parts: Mapping[int, list[Overlap]]) -> dict[int, tuple[Overlap, ...]]:
    return {peer: tuple(parts[peer]) for peer in sorted(parts)}


def _common(pieces: Pieces, starts: Sequence[int], wanted: Pieces) -> list[tuple[int, int, int]]:
    """Runs of tokens that are in both: (first slot, first place among the wanted, tokens), in the order of `pieces`."""
    wanted_of: dict[int, list[tuple[int, int, int]]] = {}
    for piece, at in zip(wanted, accumulate((p.length for p in wanted), initial=0), strict=False):
        wanted_of.setdefault(piece.sequence, []).append((piece.start, piece.stop, at))
    runs = []
    for piece, slot in zip(pieces, starts, strict=True):
        for start, stop, at in wanted_of.get(piece.sequence, ()):
            first, end = max(start, piece.start), min(stop, piece.stop)
            if first < end:
                runs.append((slot + first - piece.start, at + first - start, end - first))
    return runs


def _overlap(
    job: CpGroupJob, runs: Sequence[tuple[int, int, int]], side: int, heads: Heads, device: torch.device
) -> Overlap:
    """The overlap of runs from `_common`, with their rows on the side of tokens (0) or of attention (1)."""
    joined: list[tuple[int, int]] = []
    for run in runs:
        first, size = run[side], run[2]
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], first + size
        else:
            joined.append((first, first + size))
    rows: Rows = slice(*joined[0])
    if len(joined) > 1:
        rows = sent(torch.cat([torch.arange(first, end) for first, end in joined]), device)
    return Overlap(job.number, rows, sum(size for _, _, size in runs), heads)


def _in_order(rows: Rows) -> bool:
    return isinstance(rows, slice) and rows.start == 0


def _span(part: Overlap, spec: TensorSpec) -> slice:
    return part.heads.queries if spec.is_query else part.heads.keys


def _shape(part: Overlap, spec: TensorSpec) -> tuple[int, int, int]:
    span = _span(part, spec)
    return part.num_tokens, span.stop - span.start, spec.dim


def _width(spec: TensorSpec) -> torch.dtype:
    """Queries have one source for each value, keys may have several."""
    return spec.dtype if spec.is_query else torch.promote_types(spec.dtype, torch.float32)


def _flat(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])
