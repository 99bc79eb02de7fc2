"""No order of a plan stops where a device runs all streams in one queue: sends wait for their turns."""

from random import Random

import pytest
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import Op, StepPlan, as_lengths
from evenload.core.simulate.one_queue import send_turns
from hypothesis import event, given
from hypothesis import strategies as st

from ..core.by_hand import alone, ops
from . import one_queue


def plan_of(*rows):
    """A plan with one rank a stage, in these orders."""
    lengths, order = [4] * rows[0].count("F"), tuple(map(ops, rows))
    limits = Limits(1, 8, num_stages=len(rows), splits_backward=True)
    return check(StepPlan(as_lengths(lengths), alone(lengths), limits, order))


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=14)
AHEAD = ("F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")


def test_two_stages_that_both_have_a_second_send_stop():
    stuck = one_queue.blocked(plan_of(*AHEAD), one_queue.at_once)
    assert stuck == {(0, 0): ("send", (0, Op("F", 3))), (1, 0): ("send", (1, Op("B", 1)))}


def test_a_second_send_is_held_back_until_the_first_is_taken():
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


def test_the_schedule_of_one_forward_one_backward_holds_nothing_back():
    for stages in (2, 3, 4):
        plan = check(StepPlan(as_lengths([4] * 6), alone([4] * 6), Limits(1, 8, num_stages=stages)))
        assert not one_queue.blocked(plan, one_queue.at_once)
        assert not one_queue.blocked(plan, send_turns)


@pytest.mark.parametrize("missing", ["late", "early"])
def test_the_checker_notices_wrong_turns(missing):
    plan = plan_of(*AHEAD)

    def wrong(plan, stage, rank):
        sends = [send for turn in send_turns(plan, stage, rank).values() for send in turn]
        return {None: tuple(sends)} if missing == "late" else one_queue.at_once(plan, stage, rank)

    assert one_queue.blocked(plan, wrong)


@pytest.mark.parametrize("v_shape", [False, True], ids=["a stage a device", "a V"])
@given(
    st.integers(0, 10**9), st.lists(st.integers(1, 12), min_size=1, max_size=14), st.integers(1, 2), st.integers(2, 4)
)
def test_no_lawful_order_stops(v_shape, seed, lengths, ranks, devices):
    from harness.proof.pipelines import random_pipeline

    sizes = {"num_ranks": ranks, "num_stages": (1 + v_shape) * devices, "layers_per_stage": 1}
    plan = random_pipeline(Random(seed), lengths, **sizes, v_shape=v_shape)
    event("would stop if sends were issued at once" if one_queue.blocked(plan, one_queue.at_once) else "would not")
    assert not one_queue.blocked(plan, send_turns)
