"""Costs of several degrees of tensor parallelism in one model."""

from __future__ import annotations

from pathlib import Path

import pytest
from evenload.core.costs import costs as cost_models
from evenload.core.costs.by_setting import at_degree, with_degrees
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import MemoryCost
from evenload.training.verbs.profile import write_costs
from hypothesis import given
from hypothesis import strategies as st


def of_ranks(tp: int, divided_s: float = 8.0, whole_s: float = 1.0) -> Costs:
    """A rank takes ``whole_s`` and a tp-th of ``divided_s``: what a profile of such ranks writes."""
    cost = PassCost(launch_s=0.5, token_s=tp * (divided_s / tp + whole_s), pair_s=2.0)
    memory = MemoryCost(activation_bytes_per_token=100.0 + 10.0 * tp)
    return Costs(source=f"TP {tp}", forward=cost, backward=cost, update_s=1.0, memory=memory)


def seconds(costs: Costs, tp: int) -> float:
    return at_degree(costs, tp).of_stage(Layout(tp=tp)).forward.token_s


@given(st.integers(1, 16), st.floats(0.0, 10.0))
def test_a_degree_that_was_not_measured_is_what_its_parts_say(tp: int, whole_s: float) -> None:
    costs = with_degrees({one: of_ranks(one, whole_s=whole_s) for one in (1, 2, 4)})
    assert seconds(costs, tp) == pytest.approx(8.0 / tp + whole_s)
    found = at_degree(costs, tp)
    assert found.memory.activation_bytes_per_token == pytest.approx(100.0 + 10.0 * tp)
    assert ("not measured" in found.source) == (tp not in (1, 2, 4))
    assert at_degree(found, 1) == found


def test_a_degree_that_was_measured_is_taken_as_it_is() -> None:
    odd = of_ranks(2).model_copy(update={"forward": PassCost(token_s=123.0)})
    costs = with_degrees({1: of_ranks(1), 2: odd, 4: of_ranks(4)})
    assert at_degree(costs, 2).forward == odd.forward
    assert at_degree(costs, 1).forward == of_ranks(1).forward


def test_costs_of_one_degree_are_for_any_as_ever() -> None:
    assert at_degree(of_ranks(2), 8) == of_ranks(2)


def test_all_degrees_are_read_back_from_one_file(tmp_path: Path) -> None:
    costs, path = with_degrees({tp: of_ranks(tp) for tp in (1, 2, 4)}), tmp_path / "costs.yaml"
    write_costs(costs, path)
    assert cost_models.load(str(path), tmp_path) == costs
