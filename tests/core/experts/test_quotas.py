"""The laws of quotas: what planners answer keeps them, and each way to break one is told."""

import numpy as np
import pytest
from evenload.core.errors import PlanError
from evenload.core.experts.exact import exact_quotas
from evenload.core.experts.quotas import at_home, check_quotas, copies_of, imbalance_of, ranks_of_experts
from evenload.core.plan.expert_policy import ExpertPolicy
from hypothesis import assume, given
from hypothesis import strategies as st

from .drawn_counts import counts

SLOTS, UNKNOWN = "more copies of experts than slots", "has no copy of"


@given(counts(), st.data())
def test_a_quota_that_is_off_by_one_is_told(counts_RE, data):
    policy = ExpertPolicy("drawn", counts_RE.shape[1])
    quotas_ER = exact_quotas(counts_RE, policy)
    expert, rank = (data.draw(st.integers(0, size - 1)) for size in quotas_ER.shape)
    quotas_ER[expert, rank] += data.draw(st.sampled_from([-1, 1]))
    with pytest.raises(PlanError, match=r"lose tokens|not counts of tokens"):
        check_quotas(quotas_ER, counts_RE, policy, ())


@given(counts(), st.data())
def test_a_copy_beyond_the_slots_is_told(counts_RE, data):
    quotas_ER = exact_quotas(counts_RE, ExpertPolicy("drawn", counts_RE.shape[1]))
    most = max(map(len, copies_of(quotas_ER)))
    check_quotas(quotas_ER, counts_RE, ExpertPolicy("drawn", most), ())
    assume(most > 0)
    with pytest.raises(PlanError, match=SLOTS):
        check_quotas(quotas_ER, counts_RE, ExpertPolicy("drawn", data.draw(st.integers(0, most - 1))), ())


@given(counts(), st.data())
def test_quotas_of_swapped_ranks_are_told(counts_RE, data):
    policy = ExpertPolicy("drawn", counts_RE.shape[1])
    quotas_ER = exact_quotas(counts_RE, policy)
    copies = copies_of(quotas_ER)
    one, other = (data.draw(st.integers(0, len(counts_RE) - 1)) for _ in range(2))
    swapped_ER = quotas_ER.copy()
    swapped_ER[:, [one, other]] = quotas_ER[:, [other, one]]
    have = [set(of) | set(np.flatnonzero(ranks_of_experts(*quotas_ER.shape) == r)) for r, of in enumerate(copies)]
    if all(set(np.flatnonzero(swapped_ER[:, rank])) <= have[rank] for rank in (one, other)):
        check_quotas(swapped_ER, counts_RE, policy, copies)
    else:
        with pytest.raises(PlanError, match=UNKNOWN):
            check_quotas(swapped_ER, counts_RE, policy, copies)


@given(counts(), st.data())
def test_quotas_below_zero_are_told_though_every_token_is_counted_once(counts_RE, data):
    num_ranks, num_experts = counts_RE.shape
    assume(num_ranks > 1)
    policy = ExpertPolicy("drawn", num_experts)
    quotas_ER = exact_quotas(counts_RE, policy)
    expert = data.draw(st.integers(0, num_experts - 1))
    one, other = data.draw(st.permutations(range(num_ranks)))[:2]
    below = int(quotas_ER[expert, one]) + data.draw(st.integers(1, 5))
    quotas_ER[expert, one] -= below
    quotas_ER[expert, other] += below
    with pytest.raises(PlanError, match="not counts of tokens"):
        check_quotas(quotas_ER, counts_RE, policy, ())


def test_quotas_of_another_shape_are_told():
    with pytest.raises(PlanError, match="not counts of tokens by expert and rank"):
        check_quotas(np.zeros((3, 2), dtype=np.int64), np.zeros((2, 4), dtype=np.int64), ExpertPolicy("drawn"), ())


def test_experts_at_home_need_no_copies_and_no_tokens_are_even():
    counts_RE = np.array([[5, 0, 1, 2], [3, 3, 0, 0]])
    home_ER = at_home(counts_RE, ExpertPolicy(), ())
    assert copies_of(home_ER) == ((), ())
    assert home_ER.tolist() == [[8, 0], [3, 0], [0, 1], [0, 2]]
    assert imbalance_of(home_ER) == 11 / 7
    assert imbalance_of(home_ER * 0) == 1.0


def test_a_copy_that_another_rank_has_is_no_copy_of_ones_own():
    """Three ranks with an expert each; rank 0 has a copy of expert 1, rank 1 one of expert 2."""
    counts_RE, policy, copies = np.full((3, 3), 4), ExpertPolicy("drawn", 2), ((1,), (2,), ())
    home_ER = at_home(counts_RE, policy, ())
    for expert, rank in ((1, 0), (2, 1)):
        quotas_ER = home_ER.copy()
        quotas_ER[expert, [expert, rank]] += (-5, 5)
        assert check_quotas(quotas_ER, counts_RE, policy, copies) is quotas_ER
    for expert, rank in ((2, 0), (1, 2), (0, 1)):
        quotas_ER = home_ER.copy()
        quotas_ER[expert, [expert, rank]] += (-1, 1)
        with pytest.raises(PlanError, match=UNKNOWN) as caught:
            check_quotas(quotas_ER, counts_RE, policy, copies)
        assert caught.value.found == f"rank {rank}: {expert}"
        check_quotas(quotas_ER, counts_RE, policy, ())
