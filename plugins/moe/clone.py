"""Clone: copies chosen from exact counts, in every layer of every micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.aliases import Ints
from ...core.experts.exact import exact_quotas, most_tokens
from ...core.experts.quotas import copies_of
from ...core.plan.expert_policy import ExpertPolicy, LayerCopies
from .few import few_copies

_TRIALS = 5
"""Shares above the policy's that are tried where the slots are too few for it."""


def clone(counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """Quotas [E, R] of which no rank has more than the policy tolerates, if its slots allow: a `LayerPlanner`.

    With as many slots as a rank has experts of its own every loads come out exact, in closed form. Where the policy
    asks for less (a tolerance, fewer slots, no small copies), copies are few.
    """
    num_ranks, num_experts = counts_RE.shape
    own = num_experts // num_ranks
    asks_less = policy.tolerance > 1 or policy.slots < own or policy.least_tokens > 1
    if not asks_less:
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
    if policy.least_tokens <= 1:
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
