"""Costs of several settings in one model: degrees of tensor parallelism, what ranks divide between them."""

import pytest
from evenload.core.costs import costs as cost_models
from evenload.core.costs.by_setting import at_degree, at_sharding, with_degrees, with_shardings
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import MemoryCost
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import load
from hypothesis import given
from hypothesis import strategies as st


def of_ranks(tp, divided_s=8.0, whole_s=1.0):
    """A rank takes ``whole_s`` and a tp-th of ``divided_s``: what a profile of such ranks writes."""
    cost = PassCost(launch_s=0.5, token_s=tp * (divided_s / tp + whole_s), pair_s=2.0)
    memory = MemoryCost(activation_bytes_per_token=100.0 + 10.0 * tp)
    return Costs(source=f"TP {tp}", forward=cost, backward=cost, update_s=1.0, memory=memory)


def seconds(costs, tp):
    return at_degree(costs, tp).of_stage(Layout(tp=tp)).forward.token_s


@given(st.integers(1, 16), st.floats(0.0, 10.0))
def test_a_degree_that_was_not_measured_is_what_its_parts_say(tp, whole_s):
    costs = with_degrees({one: of_ranks(one, whole_s=whole_s) for one in (1, 2, 4)})
    assert seconds(costs, tp) == pytest.approx(8.0 / tp + whole_s)
    found = at_degree(costs, tp)
    assert found.memory.activation_bytes_per_token == pytest.approx(100.0 + 10.0 * tp)
    assert ("not measured" in found.source) == (tp not in (1, 2, 4))
    assert at_degree(found, 1) == found


def test_a_degree_that_was_measured_is_taken_as_it_is():
    odd = of_ranks(2).model_copy(update={"forward": PassCost(token_s=123.0)})
    costs = with_degrees({1: of_ranks(1), 2: odd, 4: of_ranks(4)})
    assert at_degree(costs, 2).forward == odd.forward
    assert at_degree(costs, 1).forward == of_ranks(1).forward


def test_costs_that_do_not_say_their_setting_are_for_any():
    assert at_degree(of_ranks(2), 8) == of_ranks(2)
    assert at_sharding(of_ranks(1), "parameters", {"fixed_bytes": 18.0}) == of_ranks(1)


def test_all_degrees_are_read_back_from_one_file(tmp_path, write_costs):
    costs, path = with_degrees({tp: of_ranks(tp) for tp in (1, 2, 4)}), tmp_path / "costs.yaml"
    write_costs(costs, path)
    assert cost_models.load(str(path), tmp_path) == costs


STATES = {"fixed_bytes": 18.0, "sharded_bytes": 18.0, "gathered_bytes": 2.0}


def of_sharding(sharding, launch_s=0.5):
    cost = PassCost(launch_s=launch_s, token_s=9.0, pair_s=2.0)
    memory = MemoryCost(fixed_bytes=16.0, sharded_bytes=12.0, activation_bytes_per_token=100.0)
    return Costs(source="this machine", forward=cost, backward=cost, update_s=1.0, memory=memory, sharding=sharding)


def test_a_sharding_that_was_measured_is_taken_as_it_is_and_another_has_counted_states(tmp_path, write_costs):
    both = with_shardings(of_sharding("optimizer"), {"parameters": of_sharding("parameters", 5.0)})
    write_costs(both, tmp_path / "costs.yaml")
    assert cost_models.load(str(tmp_path / "costs.yaml"), tmp_path) == both
    gathered = at_sharding(both, "parameters", STATES)
    assert (gathered.forward.launch_s, gathered.memory.fixed_bytes) == (5.0, 16.0)
    assert at_sharding(both, "optimizer", STATES) == of_sharding("optimizer").model_copy(update={"sharding": None})
    none = at_sharding(both, "none", STATES)
    assert "sharding none was not measured" in none.source
    assert (none.forward.launch_s, none.memory.activation_bytes_per_token) == (0.5, 100.0)
    assert {name: getattr(none.memory, name) for name in STATES} == STATES
    assert at_sharding(none, "parameters", {}) == none


def test_a_recipe_takes_its_own_of_a_file(tmp_path, write_costs):
    both = with_shardings(of_sharding("optimizer"), {"parameters": of_sharding("parameters", 5.0)})
    write_costs(both, tmp_path / "costs.yaml")
    words = ["trainer=deepspeed", f"costs={tmp_path / 'costs.yaml'}", "model.num_layers=1"]
    stages = {}
    for stage in (0, 1, 3):
        recipe = load("quickstart", [*words, f"deepspeed.zero_stage={stage}"])
        stages[stage] = PlanChain.of_recipe(recipe, recipe.layout(2)).context.costs
    assert [stages[stage].forward.launch_s for stage in (0, 1, 3)] == [0.5, 0.5, 5.0]
    # Float32 weights, gradients and two Adam states; nothing of them is divided.
    assert stages[0].memory.fixed_bytes > 1e6 > stages[1].memory.fixed_bytes
    assert stages[0].memory.sharded_bytes == 0


@pytest.mark.parametrize("name", ["by_tp", "by_sharding"])
def test_a_frozen_base_is_frozen_in_all_that_was_measured(name):
    other = of_sharding("parameters", 5.0)
    both = with_shardings(of_sharding("none"), {"parameters": other})
    both = with_degrees({1: both, 2: other}) if name == "by_tp" else both
    (frozen,) = getattr(both.frozen().holding(fixed_bytes=3.0), name).values()
    assert (frozen.backward, frozen.update_s) == (other.frozen().backward, 0.0)
    assert frozen.memory.fixed_bytes == 3.0
