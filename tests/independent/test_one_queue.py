"""No order of a plan stops where a device runs all streams in one queue: sends wait for their turns."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.simulate.one_queue import send_turns
from hypothesis import event, given, settings
from hypothesis import strategies as st

HERE = Path(__file__)
EXPLORING = settings.get_current_profile_name() == "explore"


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=14)
one_queue = load("one_queue", HERE.with_name("one_queue.py"))
pipelines = load("random_pipelines", HERE.parents[1] / "integrations" / "megatron" / "random_pipelines.py")


def ops(text: str) -> tuple[Op, ...]:
    return tuple(Op(word[0], int(word[1:])) for word in text.split())  # type: ignore[arg-type]


def plan_of(*rows: str) -> StepPlan:
    """A plan with one rank a stage, in these orders."""
    count = max(op.micro_batch for op in ops(rows[0])) + 1
    limits = Limits(1, 8, num_stages=len(rows), splits_backward=True)
    micro_batches = tuple(MicroBatch((Slice(i, 0, 4),), (0,)) for i in range(count))
    return check(StepPlan(as_lengths([4] * count), micro_batches, limits, order=tuple(map(ops, rows))))


AHEAD = ("F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")


def test_two_stages_that_both_have_a_second_send_stop() -> None:
    stuck = one_queue.blocked(plan_of(*AHEAD), one_queue.at_once)
    assert stuck == {(0, 0): ("send", (0, Op("F", 3))), (1, 0): ("send", (1, Op("B", 1)))}


def test_a_second_send_is_held_back_until_the_first_is_taken() -> None:
    plan = plan_of(*AHEAD)
    turns = [
        {
            staged and staged[1]: "".join(kind for _, kind in sends)
            for staged, sends in send_turns(plan, stage, 0).items()
            if sends
        }
        for stage in range(2)
    ]
    assert turns == [
        {Op("F", 1): "F", Op("F", 2): "F", Op("B", 0): "F", Op("B", 2): "F"},
        {Op("F", 1): "B", Op("F", 2): "B", Op("F", 3): "B", None: "B"},
    ]
    assert not one_queue.blocked(plan, send_turns)


def test_the_schedule_of_one_forward_one_backward_holds_nothing_back() -> None:
    for stages in (2, 3, 4):
        count = 6
        micro_batches = tuple(MicroBatch((Slice(i, 0, 4),), (0,)) for i in range(count))
        plan = check(StepPlan(as_lengths([4] * count), micro_batches, Limits(1, 8, num_stages=stages)))
        assert not one_queue.blocked(plan, one_queue.at_once)
        assert not one_queue.blocked(plan, send_turns)


@pytest.mark.parametrize("missing", ["late", "early"])
def test_the_checker_notices_wrong_turns(missing: str) -> None:
    plan = plan_of(*AHEAD)

    def wrong(plan: StepPlan, stage: int, rank: int) -> one_queue.Turns:
        sends = [send for turn in send_turns(plan, stage, rank).values() for send in turn]
        return {None: tuple(sends)} if missing == "late" else one_queue.at_once(plan, stage, rank)

    assert one_queue.blocked(plan, wrong)


@settings(max_examples=2000 if EXPLORING else 80, deadline=None)
@given(
    st.integers(0, 10**9), st.lists(st.integers(1, 12), min_size=1, max_size=14), st.integers(1, 2), st.integers(2, 5)
)
def test_no_lawful_order_stops(seed: int, lengths: list[int], ranks: int, stages: int) -> None:
    plan = pipelines.random_pipeline(Random(seed), lengths, num_ranks=ranks, num_stages=stages, layers_per_stage=1)
    event("would stop if sends were issued at once" if one_queue.blocked(plan, one_queue.at_once) else "would not")
    assert not one_queue.blocked(plan, send_turns)


@settings(max_examples=2000 if EXPLORING else 60, deadline=None)
@given(
    st.integers(0, 10**9), st.lists(st.integers(1, 12), min_size=1, max_size=10), st.integers(1, 2), st.integers(2, 4)
)
def test_no_lawful_order_of_a_v_stops(seed: int, lengths: list[int], ranks: int, devices: int) -> None:
    sizes = {"num_ranks": ranks, "num_stages": 2 * devices, "layers_per_stage": 1}
    plan = pipelines.random_pipeline(Random(seed), lengths, **sizes, v_shape=True)
    event("would stop if sends were issued at once" if one_queue.blocked(plan, one_queue.at_once) else "would not")
    assert not one_queue.blocked(plan, send_turns)
