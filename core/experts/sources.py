"""Whose tokens go to which rank: an expert's quotas divided over the ranks that the tokens come from.

Own tokens stay where a rank computes their expert; of the rest as many as can stay inside a node do; what is left goes
anywhere. At each of these levels the tokens of an expert stand in a row, by rank, beside the quotas in a row, by rank,
and each token goes to the quota that it stands beside.

Shape legend: R = ranks of a group, E = experts of a layer.
"""

from __future__ import annotations

import numpy as np

from ..aliases import Ints


def sent_by(source: int, counts_RE: Ints, quotas_ER: Ints, node_ranks: int = 0) -> Ints:
    """Tokens of a rank that it sends to each rank for each expert [E, R]; by expert they sum up to its counts."""
    return _between(source, None, counts_RE, quotas_ER, node_ranks)


def received_by(rank: int, counts_RE: Ints, quotas_ER: Ints, node_ranks: int = 0) -> Ints:
    """Tokens of each rank for each expert that a rank computes [R, E]; by expert they sum up to its quota."""
    return _between(None, rank, counts_RE, quotas_ER, node_ranks).T


def tokens_between(counts_RE: Ints, quotas_ER: Ints, node_ranks: int = 0) -> Ints:
    """Tokens of each rank that go to each other one, all experts together [R, R]; those that stay are on the diagonal.

    Rows of all experts stand one behind the other, so that a level is one sort of O(E R) ends.
    """
    num_ranks = len(counts_RE)
    from_ER, to_ER = counts_RE.T.copy(), quotas_ER.copy()
    moved = np.zeros(num_ranks * num_ranks)
    for size in _levels(num_ranks, node_ranks):
        taken_ER, filled_ER = _inside(from_ER, size, to_ER), _inside(to_ER, size, from_ER)
        sources, ranks = taken_ER.ravel().cumsum(), filled_ER.ravel().cumsum()
        ends = np.unique(np.concatenate(([0], sources, ranks)))
        source, rank = (np.searchsorted(each, ends[:-1], side="right") % num_ranks for each in (sources, ranks))
        moved += np.bincount(source * num_ranks + rank, np.diff(ends), len(moved))
        from_ER -= taken_ER
        to_ER -= filled_ER
    return moved.astype(np.int64).reshape(num_ranks, num_ranks)


def _levels(num_ranks: int, node_ranks: int) -> tuple[int, ...]:
    """Ranks of the blocks inside which tokens stay if they can, ascending."""
    return tuple(dict.fromkeys((1, node_ranks or num_ranks, num_ranks)))


def _between(source: int | None, rank: int | None, counts_RE: Ints, quotas_ER: Ints, node_ranks: int) -> Ints:
    """Of one source to all ranks, or of all sources to one rank, [E, R]."""
    num_ranks, num_experts = counts_RE.shape
    from_ER, to_ER = counts_RE.T.copy(), quotas_ER.copy()
    moved_ER = np.zeros((num_experts, num_ranks), dtype=np.int64)
    for size in _levels(num_ranks, node_ranks):
        taken_ER, filled_ER = _inside(from_ER, size, to_ER), _inside(to_ER, size, from_ER)
        one = source if rank is None else rank
        assert one is not None
        block = slice(one // size * size, one // size * size + size)
        mine_ER, theirs_ER = (taken_ER, filled_ER) if rank is None else (filled_ER, taken_ER)
        stops = mine_ER[:, block].cumsum(axis=1)[:, one - block.start]
        starts = stops - mine_ER[:, one]
        their_stops = theirs_ER[:, block].cumsum(axis=1)
        their_starts = their_stops - theirs_ER[:, block]
        overlap = np.minimum(their_stops, stops[:, None]) - np.maximum(their_starts, starts[:, None])
        moved_ER[:, block] += np.maximum(overlap, 0)
        from_ER -= taken_ER
        to_ER -= filled_ER
    return moved_ER


def _inside(tokens_ER: Ints, size: int, others_ER: Ints) -> Ints:
    """Of tokens in a row by rank, how many of each rank find a place among the others of their block of ranks."""
    num_experts, num_ranks = tokens_ER.shape
    blocks = tokens_ER.reshape(num_experts, num_ranks // size, size)
    most = np.minimum(blocks.sum(axis=2), others_ER.reshape(blocks.shape).sum(axis=2))[:, :, None]
    stops = np.minimum(blocks.cumsum(axis=2), most)
    inside: Ints = np.diff(stops, axis=2, prepend=0).reshape(num_experts, num_ranks)
    return inside
