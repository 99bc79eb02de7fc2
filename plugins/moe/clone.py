"""Clone: copies chosen from exact counts, in every layer of every micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...core.aliases import Ints
from ...core.experts.exact import exact_quotas, most_tokens
from ...core.experts.quotas import at_home, copies_of, ranks_of_experts
from ...core.plan.expert_policy import ExpertPolicy, LayerCopies
from .few import few_copies

_TRIALS = 5
"""Shares above the policy's that are tried where the slots are too few for it."""


def clone(counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """Quotas [E, R] of which no rank has more than the policy tolerates, if its slots allow: a `LayerPlanner`.

    With as many slots as a rank has experts of its own every loads come out exact, in closed form. Where the policy
    asks for less (a tolerance, fewer slots), copies are few.

    Copies of different ranks travel at once: the first copy of every rank takes no longer than a layer's first copy at
    all. So the policy's least tokens are what all copies together must take off the busiest rank, or experts stay at
    home; and what each further copy of one rank must take by itself.
    """
    tokens_R = counts_RE.sum(axis=0).reshape(len(counts_RE), -1).sum(axis=1)
    busiest, least = int(tokens_R.max()), max(1, policy.least_tokens)
    if busiest - int(tokens_R.mean()) < least:
        return at_home(counts_RE, policy, copies)
    quotas_ER = _even(counts_RE, policy._replace(least_tokens=0))
    if least > 1 and policy.slots > 1:
        quotas_ER = _without_small(quotas_ER, least)
    enough = busiest - int(quotas_ER.sum(axis=0).max()) >= least
    return quotas_ER if enough else at_home(counts_RE, policy, copies)


def _without_small(quotas_ER: Ints, least: int) -> Ints:
    """Every copy of a rank but its largest is back home if it takes fewer tokens."""
    homes_E, ranks = ranks_of_experts(*quotas_ER.shape), np.arange(quotas_ER.shape[1])
    away_ER = quotas_ER.copy()
    away_ER[np.arange(len(homes_E)), homes_E] = 0
    away_ER[away_ER.argmax(axis=0), ranks] = 0
    small_ER = np.where(away_ER < least, away_ER, 0)
    if small_ER.any():
        quotas_ER = quotas_ER - small_ER
        quotas_ER[np.arange(len(homes_E)), homes_E] += small_ER.sum(axis=1)
    return quotas_ER


def _even(counts_RE: Ints, policy: ExpertPolicy) -> Ints:
    """Quotas as even as the policy asks, whatever a copy takes."""
    num_ranks, num_experts = counts_RE.shape
    if policy.tolerance <= 1 and policy.slots >= num_experts // num_ranks:
        exact_ER: Ints = exact_quotas(counts_RE, policy)
        return exact_ER
    most = int(most_tokens(counts_RE.sum(), num_ranks, policy))
    best_ER: Ints | None = None
    least = 0
    for quotas_ER in _drafts(counts_RE, policy, most):
        busiest = int(quotas_ER.sum(axis=0).max())
        if best_ER is None or busiest < least:
            best_ER, least = quotas_ER, busiest
        if busiest <= most:
            break
    assert best_ER is not None
    return best_ER


def _drafts(counts_RE: Ints, policy: ExpertPolicy, most: int) -> Iterator[Ints]:
    """Quotas within the slots, from the fewest copies to what else may come below the share."""
    quotas_ER = few_copies(counts_RE, policy)
    yield quotas_ER
    if policy.node_ranks:
        yield few_copies(counts_RE, policy._replace(node_ranks=0))
    exact_ER = exact_quotas(counts_RE, policy)
    if max(map(len, copies_of(exact_ER))) <= policy.slots:
        yield exact_ER
    low, high = most, int(quotas_ER.sum(axis=0).max())
    for _ in range(_TRIALS):
        if low + 1 >= high:
            return
        share = (low + high) // 2
        trial_ER = few_copies(counts_RE, policy, share)
        yield trial_ER
        busiest = int(trial_ER.sum(axis=0).max())
        low, high = (low, busiest) if busiest <= share else (share, high)
