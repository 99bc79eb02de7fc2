"""Copies from exact counts: lawful on any counts, exact where slots allow, and as few as an integer program needs."""

import numpy as np
import pulp
import pytest
from evenload.core.experts.exact import most_tokens
from evenload.core.experts.quotas import at_home, check_quotas, copies_of
from evenload.core.plan.expert_policy import ExpertPolicy
from evenload.plugins.moe.clone import clone
from hypothesis import given
from hypothesis import strategies as st

from ...core.experts.drawn_counts import counts, policies
from .popular import zipf


def busiest_over_mean(quotas_ER):
    tokens_R = quotas_ER.sum(axis=0)
    return float(tokens_R.max() / tokens_R.mean())


def num_copies(quotas_ER):
    return sum(map(len, copies_of(quotas_ER)))


@given(counts(), st.data())
def test_any_policy_is_kept_on_any_counts(counts_RE, data):
    policy = data.draw(policies(counts_RE))
    quotas_ER = check_quotas(clone(counts_RE, policy, ()), counts_RE, policy, ())
    busiest = quotas_ER.sum(axis=0).max()
    num_ranks, num_experts = counts_RE.shape
    most = most_tokens(counts_RE.sum(), num_ranks, policy)
    assert busiest <= max(most, at_home(counts_RE, policy, ()).sum(axis=0).max())
    if policy.slots == num_experts // num_ranks and policy.least_tokens <= 1:
        assert busiest <= most
    taken = [sorted(quotas_ER[expert, rank] for expert in of) for rank, of in enumerate(copies_of(quotas_ER))]
    assert all(tokens >= policy.least_tokens for of_rank in taken for tokens in of_rank[:-1])
    off_busiest = at_home(counts_RE, policy, ()).sum(axis=0).max() - busiest
    assert not any(taken) or off_busiest >= max(1, policy.least_tokens)


def test_copies_that_take_too_little_off_the_busiest_rank_together_stay_at_home():
    """Of four experts of the first rank with four tokens each, the second has room for one."""
    counts_RE, policy = np.array([[4, 4, 4, 4, 0, 0, 0, 0], [0] * 8]), ExpertPolicy("clone", 1, least_tokens=4)
    assert num_copies(clone(counts_RE, policy, ())) == 1
    assert num_copies(clone(counts_RE, policy._replace(least_tokens=5), ())) == 0


def test_tokens_of_a_copy_that_is_too_small_go_home():
    """Rank 0 takes expert 3 whole, and to be even to the last one 2 of expert 5: fewer than a copy must take."""
    counts_RE = np.array([[3, 14, 3, 26, 24, 21], [6, 3, 1, 18, 10, 23]])
    loads_E = counts_RE.sum(axis=0)
    policy = ExpertPolicy("clone", 3, least_tokens=2)
    assert copies_of(clone(counts_RE, policy, ())) == ((3, 5), ())
    without = check_quotas(clone(counts_RE, policy._replace(least_tokens=6), ()), counts_RE, policy, ())
    assert copies_of(without) == ((3,), ())
    np.testing.assert_array_equal(without.sum(axis=1), loads_E)


@pytest.mark.parametrize("exponent", [0.3, 0.6, 0.9, 1.2])
@pytest.mark.parametrize("size", [(64, 128), (256, 256)], ids=str)
def test_one_slot_is_enough_for_exact_loads(size, exponent):
    counts_RE = zipf(7, exponent, *size)
    assert busiest_over_mean(clone(counts_RE, ExpertPolicy("clone", 1), ())) < 1.0001


@pytest.mark.slow
@pytest.mark.parametrize(("exponent", "tolerance"), [(0.6, 1.01), (0.9, 1.01), (1.2, 1.01), (1.2, 1.0)])
def test_copies_are_as_few_as_an_integer_program_finds(exponent, tolerance):
    counts_RE = zipf(5, exponent, 8, 16, topk=4)
    policy = ExpertPolicy("clone", 1, tolerance)
    assert num_copies(clone(counts_RE, policy, ())) == fewest_copies(counts_RE, policy)


@pytest.mark.parametrize(("exponent", "most"), [(0.3, 41), (0.6, 48), (0.9, 52), (1.2, 54)])
def test_a_hundredth_over_the_mean_saves_copies(exponent, most):
    copies = [num_copies(clone(zipf(s, exponent, 64, 128), ExpertPolicy("clone", 1, 1.01), ())) for s in range(6)]
    assert np.mean(copies) <= most


def fewest_copies(counts_RE, policy):
    """The fewest copies with which no rank is over its share, by HiGHS."""
    num_ranks, num_experts = counts_RE.shape
    own = num_experts // num_ranks
    loads_E, most = counts_RE.sum(axis=0), int(most_tokens(counts_RE.sum(), num_ranks, policy))
    pairs = [(e, t) for e in range(num_experts) for t in range(num_ranks) if e // own != t]
    problem = pulp.LpProblem("copies", pulp.LpMinimize)
    copied = {pair: pulp.LpVariable(f"copied_{pair[0]}_{pair[1]}", cat="Binary") for pair in pairs}
    moved = {pair: pulp.LpVariable(f"moved_{pair[0]}_{pair[1]}", 0) for pair in pairs}
    problem += pulp.lpSum(copied.values())
    for pair in pairs:
        problem += moved[pair] <= min(int(loads_E[pair[0]]), most) * copied[pair]
    for rank in range(num_ranks):
        came = [moved[e, t] for e, t in pairs if t == rank]
        went = [moved[e, t] for e, t in pairs if e // own == rank]
        problem += pulp.lpSum(copied[e, t] for e, t in pairs if t == rank) <= policy.slots
        home = int(loads_E[rank * own : rank * own + own].sum())
        problem += home + pulp.lpSum(came) - pulp.lpSum(went) <= most
    for expert in range(num_experts):
        problem += pulp.lpSum(moved[e, t] for e, t in pairs if e == expert) <= int(loads_E[expert])
    problem.solve(pulp.HiGHS(msg=False, threads=1, timeLimit=60))
    assert problem.sol_status == pulp.LpSolutionOptimal
    return round(pulp.value(problem.objective))
