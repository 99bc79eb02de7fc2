"""Exact loads in closed form: no rank computes more than its share, and each takes from at most one other.

Walker's alias argument (ACM TOMS 3(3), 1977): a rank below its share is filled whole by one above it, which takes from
the next one where it falls below its share itself. What a rank is overdrawn by is part of what one taker lacks, so it
never gives more than it has. A rank so needs copies of at most E/R experts, those of one other, whatever the loads.

Givers lie on a line by what they have too much, the hottest expert first, and takers on a line next to it by what they
lack, the roomiest first: who stands next to whom is two prefix sums and two binary searches (parallel construction:
Huebschle-Schneider and Sanders, arXiv 1903.00227). What a giver exports lies along its experts in the same manner.
Nothing loops over ranks or experts. Cost: O(E R) to write the quotas.

Shape legend: R = ranks of a group, E = experts of a layer, M = experts that stand on a rank, N = nodes,
K = R/N.
"""

from __future__ import annotations

import numpy as np

from ..aliases import Ints
from ..plan.expert_policy import ExpertPolicy

_PARTS = 1 << 20
"""Tolerances are read in parts of this size, downwards, so that all arithmetic is of integers."""
_MOST_TOKENS = 1 << 34
"""More than a rank has in one pass."""


def _sums(ranks_R: Ints, tokens_R: Ints) -> Ints:
    return np.bincount(ranks_R, tokens_R, len(ranks_R)).astype(np.int64)


def most_tokens(total: int, num_ranks: int, policy: ExpertPolicy) -> int:
    """The share of a rank: ceil(mean) tokens, or as many more as the policy's tolerance allows."""
    tolerated = total * int(policy.tolerance * _PARTS) // (num_ranks * _PARTS)
    return max(-(-total // num_ranks), tolerated)


def exact_quotas(counts_RE: Ints, policy: ExpertPolicy) -> Ints:
    """Quotas [E, R] of which no rank has more than `most_tokens`, with copies on a rank of at most E/R experts.

    Copies stay inside nodes as far as they can. Of the policy it reads the tolerance and the nodes.
    """
    num_ranks, num_experts = counts_RE.shape
    shape = num_ranks, num_experts // num_ranks
    return levelled(counts_RE.sum(0).reshape(shape), np.arange(num_experts).reshape(shape), num_experts, policy)


def levelled(tokens_RM: Ints, experts_RM: Ints, num_experts: int, policy: ExpertPolicy) -> Ints:
    """Quotas [E, R] of which no rank has more than `most_tokens`, from what stands on each rank: so many tokens of M
    different experts. A rank then takes from at most one other, of at most these M."""
    num_ranks = tokens_RM.shape[0]
    tokens_R = tokens_RM.sum(1)
    over_R = tokens_R - most_tokens(tokens_R.sum(), num_ranks, policy)
    sizes_RM, places_RM = descending(tokens_RM)
    experts_RM = experts_RM[np.arange(num_ranks)[:, None], places_RM]
    giver_R, taken_R = _takers(over_R, sizes_RM[:, 0], policy.node_ranks or num_ranks)
    return _laid(sizes_RM, experts_RM, num_experts, giver_R, taken_R)


def exact_far_and_near(counts_RE: Ints, policy: ExpertPolicy) -> list[Ints]:
    """Two `exact_quotas`, in less time than both: those that know no nodes, and the policy's."""
    num_ranks, num_experts = counts_RE.shape
    tokens_RM = counts_RE.sum(axis=0).reshape(num_ranks, -1)
    sizes_RM, places_RM = descending(tokens_RM)
    experts_RM = places_RM + np.arange(0, num_experts, num_experts // num_ranks)[:, None]
    over_R, hottest_R = tokens_RM.sum(axis=1) - most_tokens(tokens_RM.sum(), num_ranks, policy), sizes_RM[:, 0]
    giver_R, taken_R = _filled(over_R, hottest_R, policy.node_ranks)
    left_R = over_R + taken_R - _sums(giver_R, taken_R)
    both = np.concatenate([over_R, left_R]), np.concatenate([hottest_R, hottest_R])
    givers, takens = _filled(*both, num_ranks, whole=True)
    (far_R, again_R), (far_taken_R, more_R) = givers.reshape(2, -1), takens.reshape(2, -1)
    near_R = np.where(more_R > 0, again_R - num_ranks, giver_R)
    pairs = (far_R, far_taken_R), (near_R, taken_R + more_R)
    return [_laid(sizes_RM, experts_RM, num_experts, *pair) for pair in pairs]


def descending(values: Ints) -> tuple[Ints, Ints]:
    """Values that are not negative along the last axis, largest first, and their places; of equal ones the first."""
    size = values.shape[-1]
    keys = np.sort(np.arange(size) - values * size)
    places = keys % size
    return (places - keys) // size, places


def _takers(over_R: Ints, hottest_R: Ints, node_ranks: int) -> tuple[Ints, Ints]:
    """From which rank each rank takes, and how many tokens: first inside nodes, then from anywhere."""
    num_ranks = over_R.shape[0]
    if node_ranks == num_ranks:
        return _filled(over_R, hottest_R, num_ranks, whole=True)
    giver_R, taken_R = _filled(over_R, hottest_R, node_ranks)
    left_R = over_R + taken_R - _sums(giver_R, taken_R)
    far_giver_R, far_taken_R = _filled(left_R, hottest_R, num_ranks, whole=True)
    return np.where(far_taken_R > 0, far_giver_R, giver_R), taken_R + far_taken_R


def _filled(over_R: Ints, hottest_R: Ints, size: int, *, whole: bool = False) -> tuple[Ints, Ints]:
    """From which rank each rank takes, and how many tokens, inside each block of ``size`` neighbouring ranks. A block
    that is no ``whole`` group fills its last taker whole too, from a giver that others then fill: whoever took has all
    that it needs, and takes from nobody else."""
    num_ranks = over_R.shape[0]
    blocks = num_ranks // size
    firsts_N1 = (np.arange(blocks) * size)[:, None]
    excess_R, lack_R = (over_R > 0) * over_R, (over_R < 0) * -over_R
    rated_R = (over_R > 0) * (hottest_R + 1)
    givers_R = (descending(rated_R.reshape(blocks, size))[1] + firsts_N1).reshape(num_ranks)
    lack_NK, takers_NK = descending(lack_R.reshape(blocks, size))
    takers_R = (takers_NK + firsts_N1).reshape(num_ranks)

    excess_NK = excess_R[givers_R].reshape(blocks, size)
    given_NK, filled_NK = excess_NK.cumsum(1), lack_NK.cumsum(1)
    starts_NK, needed_N1 = filled_NK - lack_NK, given_NK[:, -1:]
    ends_NK = np.minimum(filled_NK, needed_N1) if whole else filled_NK
    apart_N1 = firsts_N1 * _MOST_TOKENS
    begins_R, starts_R = (given_NK + apart_N1).reshape(num_ranks), (starts_NK + apart_N1).reshape(num_ranks)
    beside_R = np.minimum(begins_R.searchsorted(starts_R, "right"), num_ranks - 1)
    amount_R = ((starts_NK < needed_N1) * (ends_NK - starts_NK)).reshape(num_ranks)
    last_R = ends_NK.reshape(num_ranks)[starts_R.searchsorted(begins_R) - 1]
    overdrawn_R = last_R - given_NK.reshape(num_ranks)
    goes_on_R = ((excess_NK > 0) & (given_NK < needed_N1)).reshape(num_ranks) & (overdrawn_R > 0)
    return _written(givers_R, takers_R, beside_R, amount_R, goes_on_R * overdrawn_R)


def _written(givers_R: Ints, takers_R: Ints, beside_R: Ints, amount_R: Ints, overdrawn_R: Ints) -> tuple[Ints, Ints]:
    """By rank, from whom it takes and how much: takers from the giver next to them, overdrawn givers from the next."""
    num_ranks = givers_R.shape[0]
    ranks_R = np.arange(num_ranks)
    giver_R, taken_R = ranks_R * 0, ranks_R * 0
    giver_R[takers_R] = np.where(amount_R > 0, givers_R[beside_R], takers_R)
    taken_R[takers_R] = amount_R
    giver_R[givers_R] = np.where(overdrawn_R > 0, givers_R[(ranks_R + 1) % num_ranks], giver_R[givers_R])
    taken_R[givers_R] += overdrawn_R
    return giver_R, taken_R


def _laid(sizes_RM: Ints, experts_RM: Ints, num_experts: int, giver_R: Ints, taken_R: Ints) -> Ints:
    """The quotas [E, R]: what a giver exports, the largest part first, along its experts, the hottest first."""
    num_ranks = sizes_RM.shape[0]
    ranks_R = np.arange(num_ranks)
    keys_R = np.sort(giver_R * (num_ranks * _MOST_TOKENS) + ranks_R - taken_R * num_ranks)
    to_R = keys_R % num_ranks
    from_R, tokens_R = giver_R[to_R], taken_R[to_R]
    before_R = tokens_R.cumsum(0) - tokens_R
    starts_R = before_R - before_R[from_R.searchsorted(from_R)]
    ends_RM = sizes_RM.cumsum(1)
    begins_RM = ends_RM - sizes_RM
    stops_RM = np.minimum(ends_RM[from_R], (starts_R + tokens_R)[:, None])
    parts_RM = stops_RM - np.maximum(begins_RM[from_R], starts_R[:, None])
    kept_RM = ends_RM - np.maximum(begins_RM, np.minimum(ends_RM, _sums(giver_R, taken_R)[:, None]))
    quotas_ER = np.zeros((num_experts, num_ranks), dtype=np.int64)
    quotas_ER[experts_RM, ranks_R[:, None]] = kept_RM
    quotas_ER[experts_RM[from_R], to_R[:, None]] += (parts_RM > 0) * parts_RM
    return quotas_ER
