"""Other people's planners of layers: lawful on any counts, and what their descriptions promise."""

import builtins

import numpy as np
import pytest
from evenload.api import load_plugins, load_recipe
from evenload.core.errors import EvenloadError
from evenload.core.experts.quotas import at_home, check_quotas, copies_of, imbalance_of
from evenload.core.plan.expert_policy import ExpertPolicy
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.plugins.moe.baselines import BASELINES, LAYERS
from evenload.plugins.moe.baselines.placed import eplb_copies, laer_copies
from evenload.plugins.moe.reroute import reroute
from hypothesis import given
from hypothesis import strategies as st

from ...core.experts.drawn_counts import counts

CHOICES = {"eplb": eplb_copies, "laer": laer_copies, "lp": eplb_copies}


@pytest.mark.parametrize("name", LAYERS)
@given(counts_RE=counts(most_ranks=6, most_own=3), data=st.data())
def test_quotas_are_lawful_on_any_counts(name, counts_RE, data):
    num_ranks, num_experts = counts_RE.shape
    own = num_experts // num_ranks
    halves = data.draw(st.booleans()) and num_ranks % 2 == 0
    slots = data.draw(st.integers(0, own))
    policy = ExpertPolicy(name, slots, node_ranks=num_ranks // 2 if halves else 0)
    copies = ()
    if name in CHOICES:
        before_E = data.draw(st.lists(st.floats(0, 1e6), min_size=num_experts, max_size=num_experts))
        copies = CHOICES[name](before_E, num_ranks, policy)
        policy = policy._replace(slots=slots + own)
        assert max(map(len, copies)) <= policy.slots
        assert set().union(*copies) == set(range(num_experts))
    quotas_ER = check_quotas(LAYERS[name](counts_RE, policy, copies), counts_RE, policy, copies)
    if name in ("ultraep", "moonep"):
        assert quotas_ER.sum(axis=0).max() <= at_home(counts_RE, policy, ()).sum(axis=0).max() or slots < own


def steep(num_ranks=8, num_experts=32):
    return np.random.default_rng(2).integers(0, 3000, (num_ranks, num_experts)) * (np.arange(num_experts) < 9)


def test_roomiest_first_is_exact_with_a_slot_for_each_expert_of_a_rank():
    tokens_R = LAYERS["moonep"](steep(), ExpertPolicy("moonep", 4), ()).sum(axis=0)
    assert np.ptp(tokens_R) <= 1


def test_a_threshold_is_at_least_a_hundredth_over_the_mean():
    counts_RE = steep()
    quotas_ER = LAYERS["ultraep"](counts_RE, ExpertPolicy("ultraep", 4), ())
    assert 1.0 < imbalance_of(quotas_ER) <= 1.0101
    fewer = LAYERS["ultraep"](counts_RE, ExpertPolicy("ultraep", 1), ())
    assert max(map(len, copies_of(fewer))) == 1
    assert imbalance_of(fewer) >= imbalance_of(quotas_ER)


def test_busier_experts_have_more_places_and_loads_that_come_again_are_even():
    counts_RE = steep()
    loads_E, policy = counts_RE.sum(axis=0), ExpertPolicy("eplb", 2)
    copies = eplb_copies(loads_E.tolist(), 8, policy)
    places_E = np.bincount([expert for experts in copies for expert in experts], minlength=32)
    assert places_E.sum() == 32 + 2 * 8
    assert places_E[loads_E == loads_E.max()] > 1 == places_E[loads_E == 0].max()
    assert (
        imbalance_of(LAYERS["eplb"](counts_RE, policy, copies)) < 1.3 < 3 < imbalance_of(at_home(counts_RE, policy, ()))
    )


def test_tokens_stay_in_nodes_that_have_the_expert():
    """Expert 0 has a place on each node of two ranks: the four tokens of node 0 stay there."""
    counts_RE = np.array([[4, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    quotas_ER = LAYERS["laer"](counts_RE, ExpertPolicy("laer", 2, node_ranks=2), ((0,), (1,), (0, 2), (3,)))
    assert quotas_ER[0].tolist() == [4, 0, 1, 0]


def test_the_linear_program_reaches_the_least_maximum():
    counts_RE = steep()
    copies = ((9,), (0, 30), (1, 4), (0,), (8,), (2, 8), (3,), (5, 6))
    policy = ExpertPolicy("lp", 2)
    everything = tuple(tuple(sorted({*of, *range(4 * r, 4 * r + 4)})) for r, of in enumerate(copies))
    by_program = LAYERS["lp"](counts_RE, policy._replace(slots=6), everything)
    least = reroute(counts_RE, policy, copies).sum(axis=0).max()
    assert least <= by_program.sum(axis=0).max() <= least + 3, "rounding may leave a token or two"


def chain_of_moe():
    load_plugins()
    recipe = load_recipe("moe", ["plugins.moe.enabled=true"])
    return PlanChain.of_recipe(recipe, recipe.layout())


def test_without_the_solver_the_error_says_what_to_install(monkeypatch):
    stock = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "highspy":
            raise ImportError(name=name)
        return stock(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    chain = chain_of_moe().with_loads((tuple(map(float, range(16))),) * 3)
    with pytest.raises(EvenloadError, match="linear programs") as caught:
        chain.baseline("lp", as_lengths([500, 300]))
    assert caught.value.do == "pip install PuLP highspy"
    assert chain.baseline("eplb", as_lengths([500, 300])).experts.planner == "eplb"


def test_policies_hold_copies_where_loads_are_known_and_stay_at_home_where_not():
    chain = chain_of_moe()
    lengths = as_lengths([500, 300, 900, 700])
    assert {name: chain.baseline(name, lengths).experts.planner for name in BASELINES} == {
        "static": "static",
        "eplb": "static",
        "laer": "static",
        "lp": "static",
        "ultraep": "ultraep",
        "moonep": "moonep",
    }
    knows = chain.with_loads(tuple(tuple(float(e < 4) + 1 for e in range(16)) for _ in range(3)))
    for name in ("eplb", "laer", "lp"):
        policy = knows.baseline(name, lengths).experts
        assert (policy.planner, policy.slots, len(policy.copies)) == (name, 10, 3)
        assert [len(experts) for experts in policy.copies[0]] == [10, 10]
