"""Programs drawn against each other: what is where, and what waits for ever."""

from dataclasses import replace

import pytest
from evenload.core.errors import PlanError
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.simulate.events import grid

from ..by_hand import alone, ops

PLAN = StepPlan(
    as_lengths([4] * 3),
    alone([4] * 3),
    Limits(1, 10, num_stages=2, layers_per_stage=2, splits_backward=True),
    order=(ops("F0 F1 B0 F2 B1 B2"), ops("F0 B0 F1 B1 F2 B2 W2")),
    replayed=(1,),
)


def test_every_action_that_computes_has_a_cell_at_its_time():
    assert grid(check(PLAN), [(0, 0), (1, 0)]).splitlines() == [
        "         0   1   2   3   4   5   6   7",
        "stage 0  F0  f1      B0  F2  R1  B1  B2",
        "stage 1      F0  B0  R1  B1  F2  B2  W2",
    ]


def test_an_order_that_deadlocks_is_drawn_with_what_waits():
    stuck = replace(PLAN, replayed=(), order=(ops("F0 B0 F1 F2 B1 B2"), ops("F0 F1 B0 B1 F2 B2")))
    with pytest.raises(PlanError) as caught:
        check(stuck)
    assert caught.value.what == "the order deadlocks"
    assert caught.value.do
    assert caught.value.found.splitlines() == [
        "rank 0 of stage 0 waits at B0; rank 0 of stage 1 waits at F1",
        "         0   1   2",
        "stage 0  F0 [B0]",
        "stage 1      F0 [F1]",
    ]


def test_ranks_of_one_stage_are_named():
    flat = StepPlan(PLAN.lengths, alone([4] * 3, (0, 0, 1)), Limits(2, 10))
    assert grid(check(flat), [(0, 0), (0, 1)]).splitlines() == [
        "        0   1   2   3",
        "rank 0  F0  B0  F1  B1",
        "rank 1  F2  B2",
    ]
