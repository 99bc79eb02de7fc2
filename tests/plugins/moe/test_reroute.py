"""Tokens over copies that are there: the least maximum that a linear program finds, in integers; or evenly."""

import numpy as np
import pulp
from evenload.core.experts.quotas import at_home, check_quotas, imbalance_of
from evenload.core.plan.expert_policy import ExpertPolicy
from evenload.plugins.moe.history import choose_copies
from evenload.plugins.moe.reroute import evenly, reroute
from hypothesis import given
from hypothesis import strategies as st

from ...core.experts.drawn_counts import counts


@st.composite
def drawn_copies(draw, counts_RE):
    num_ranks, num_experts = counts_RE.shape
    own = num_experts // num_ranks
    away = [[e for e in range(num_experts) if e // own != rank] for rank in range(num_ranks)]
    chosen = [draw(st.sets(st.sampled_from(experts), max_size=3)) if experts else set() for experts in away]
    return tuple(tuple(sorted(experts)) for experts in chosen)


@given(counts(most_ranks=7, most_own=3), st.data())
def test_the_busiest_rank_has_the_least_that_any_division_gives_it(counts_RE, data):
    copies, policy = data.draw(drawn_copies(counts_RE)), ExpertPolicy("reroute", 3)
    quotas_ER = check_quotas(reroute(counts_RE, policy, copies), counts_RE, policy, copies)
    assert quotas_ER.sum(axis=0).max() == np.ceil(least_maximum(counts_RE, copies) - 1e-6)


def least_maximum(counts_RE, copies):
    """Of tokens that may be cut: flows are whole where their bounds are, so that integers reach its next one."""
    num_ranks, num_experts = counts_RE.shape
    own, loads_E = num_experts // num_ranks, counts_RE.sum(axis=0)
    pairs = [(e, r) for r in range(num_ranks) for e in (*range(r * own, r * own + own), *copies[r])]
    problem = pulp.LpProblem("division", pulp.LpMinimize)
    most = pulp.LpVariable("most", 0)
    tokens = {pair: pulp.LpVariable(f"tokens_{pair[0]}_{pair[1]}", 0) for pair in pairs}
    problem += most
    for expert in range(num_experts):
        problem += pulp.lpSum(tokens[e, r] for e, r in pairs if e == expert) == int(loads_E[expert])
    for rank in range(num_ranks):
        problem += pulp.lpSum(tokens[e, r] for e, r in pairs if r == rank) <= most
    problem.solve(pulp.HiGHS(msg=False))
    return float(pulp.value(most))


@given(counts(), st.data())
def test_evenly_means_equal_parts_on_all_ranks_that_have_the_expert(counts_RE, data):
    copies, policy = data.draw(drawn_copies(counts_RE)), ExpertPolicy("layout", 3)
    quotas_ER = check_quotas(evenly(counts_RE, policy, copies), counts_RE, policy, copies)
    own = counts_RE.shape[1] // len(counts_RE)
    for expert, quota_R in enumerate(quotas_ER):
        ranks = [expert // own, *(rank for rank, experts in enumerate(copies) if expert in experts)]
        assert quota_R[ranks].sum() == counts_RE[:, expert].sum()
        assert np.ptp(quota_R[ranks]) <= 1


def test_loads_that_come_again_are_even_over_the_copies_chosen_for_them():
    counts_RE = np.random.default_rng(3).integers(0, 5000, (8, 32)) * (np.arange(32) < 9)
    policy = ExpertPolicy("reroute", 4)
    copies = choose_copies(counts_RE.sum(axis=0).tolist(), 8, policy)
    assert max(map(len, copies)) <= 4
    assert imbalance_of(reroute(counts_RE, policy, copies)) < 1.001
    assert imbalance_of(evenly(counts_RE, policy, copies)) < 2 < 3 < imbalance_of(at_home(counts_RE, policy, ()))


@given(counts(), st.integers(0, 5))
def test_chosen_copies_keep_the_slots_and_are_of_other_ranks(counts_RE, slots):
    num_ranks, num_experts = counts_RE.shape
    for rank, of in enumerate(choose_copies(counts_RE.sum(axis=0).tolist(), num_ranks, ExpertPolicy("any", slots))):
        assert len(of) <= slots
        assert list(of) == sorted(set(of))
        assert all(expert // (num_experts // num_ranks) != rank for expert in of)
