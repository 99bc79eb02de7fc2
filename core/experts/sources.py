"""Whose tokens go to which rank: an expert's quotas divided over the ranks that the tokens come from.

Own tokens stay where a rank computes their expert; of the rest as many as can stay inside a node do; what is left goes
anywhere. At each of these levels the tokens of an expert stand in a row, by rank, next to the quotas in a row, by rank,
and each token goes to the quota that it stands next to.

Shape legend: R = ranks of a group, E = experts of a layer.
"""

from __future__ import annotations

import numpy as np

from ..aliases import Ints


def sent_by(source: int, counts_RE: Ints, quotas_ER: Ints, node_ranks: int = 0) -> Ints:
    """Tokens of a rank that it sends to each rank for each expert [E, R]; by expert they sum up to its counts."""
    sent_ER = np.zeros_like(quotas_ER)
    tokens_E, divided_E = counts_RE[source], np.count_nonzero(quotas_ER, axis=1) > 1
    whole, divided = np.flatnonzero(~divided_E), np.flatnonzero(divided_E & (tokens_E > 0))
    sent_ER[whole, quotas_ER[whole].argmax(axis=1)] = tokens_E[whole]
    sent_ER[divided] = _between(source, counts_RE.T[divided], quotas_ER[divided], node_ranks)
    return sent_ER


def received_by(rank: int, counts_RE: Ints, quotas_ER: Ints, node_ranks: int = 0) -> Ints:
    """Tokens of each rank for each expert that a rank computes [R, E]; by expert they sum up to its quota."""
    received_RE = np.zeros_like(counts_RE)
    experts = np.flatnonzero(quotas_ER[:, rank])
    divided_E = np.count_nonzero(quotas_ER[experts], axis=1) > 1
    whole, divided = experts[~divided_E], experts[divided_E]
    received_RE[:, whole] = counts_RE[:, whole]
    received_RE[:, divided] = _between(rank, quotas_ER[divided], counts_RE.T[divided], node_ranks).T
    return received_RE


def tokens_between(counts_RE: Ints, quotas_ER: Ints, node_ranks: int = 0) -> Ints:
    """Tokens of each rank that go to each other one, all experts together [R, R]; those that stay are on the diagonal.

    Rows of all experts stand one after the other, so that a level is one merge of O(E R) ends.
    """
    num_ranks = len(counts_RE)
    from_ER, to_ER = counts_RE.T.copy(), quotas_ER.copy()
    moved = np.zeros(num_ranks * num_ranks)
    for size in _levels(num_ranks, node_ranks):
        taken_ER, filled_ER = _inside(from_ER, size, to_ER), _inside(to_ER, size, from_ER)
        (sources, source_ends), (ranks, rank_ends) = _in_a_row(taken_ER), _in_a_row(filled_ER)
        ends = np.insert(source_ends, np.searchsorted(source_ends, rank_ends), rank_ends)
        tokens = np.diff(ends, prepend=0)
        starts, tokens = (ends - tokens)[tokens > 0], tokens[tokens > 0]
        source = sources[np.searchsorted(source_ends, starts, side="right")]
        rank = ranks[np.searchsorted(rank_ends, starts, side="right")]
        moved += np.bincount(source * num_ranks + rank, tokens, len(moved))
        from_ER -= taken_ER
        to_ER -= filled_ER
    return moved.astype(np.int64).reshape(num_ranks, num_ranks)


def _in_a_row(tokens_ER: Ints) -> tuple[Ints, Ints]:
    """The ranks of all tokens, expert by expert, and where those of each end."""
    places = np.flatnonzero(tokens_ER)
    return places % tokens_ER.shape[1], tokens_ER.ravel()[places].cumsum()


def _levels(num_ranks: int, node_ranks: int) -> tuple[int, ...]:
    """Ranks of the blocks inside which tokens stay if they can, ascending."""
    return tuple(dict.fromkeys((1, node_ranks or num_ranks, num_ranks)))


def _between(one: int, from_ER: Ints, to_ER: Ints, node_ranks: int) -> Ints:
    """What goes from one rank to each, where rows of tokens stand next to rows of places; or comes from each to one."""
    num_ranks = from_ER.shape[1]
    moved_ER = np.zeros_like(to_ER)
    for size in _levels(num_ranks, node_ranks):
        taken_ER, filled_ER = _inside(from_ER, size, to_ER), _inside(to_ER, size, from_ER)
        block = slice(one // size * size, one // size * size + size)
        stops = taken_ER[:, block.start : one + 1].sum(axis=1)[:, None]
        starts = stops - taken_ER[:, one : one + 1]
        their_stops = filled_ER[:, block].cumsum(axis=1)
        overlap = np.minimum(their_stops, stops) - np.maximum(their_stops - filled_ER[:, block], starts)
        moved_ER[:, block] += np.maximum(overlap, 0)
        from_ER, to_ER = from_ER - taken_ER, to_ER - filled_ER
    return moved_ER


def _inside(tokens_ER: Ints, size: int, others_ER: Ints) -> Ints:
    """How many tokens of each rank, in a row by rank, find a place among the others of their block of ranks."""
    if size == 1:
        return np.minimum(tokens_ER, others_ER)
    num_experts, num_ranks = tokens_ER.shape
    blocks = tokens_ER.reshape(num_experts, num_ranks // size, size)
    most = np.minimum(blocks.sum(axis=2), others_ER.reshape(blocks.shape).sum(axis=2))[:, :, None]
    stops = np.minimum(blocks.cumsum(axis=2), most)
    stops[:, :, 1:] -= stops[:, :, :-1].copy()
    inside: Ints = stops.reshape(num_experts, num_ranks)
    return inside
