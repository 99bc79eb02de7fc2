"""Predicted times against schedules small enough to draw by hand."""

from dataclasses import replace

import pytest
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.simulate.predict import predict

from ..by_hand import ONE, ops, plan


def test_a_group_waits_for_its_last_member():
    result = predict(plan([2, 4, 1], [(0,), (0, 1), (1,)], Limits(2, 10)), ONE)
    assert result.step_s == 6 + 6 + 3
    assert result.busy_s == (12, 9)


def test_one_forward_one_backward_has_its_textbook_bubble():
    """m equal micro-batches on P stages: (m + P - 1) rounds of forward and backward."""
    made = plan([1] * 8, [(0,)] * 8, Limits(1, 10, num_stages=4))
    result = predict(made, ONE)
    assert result.step_s == (8 + 3) * 3
    assert 1 - sum(result.busy_s) / result.step_s == pytest.approx(3 / 11)


def test_ranks_with_homes_of_their_own_have_their_own_work():
    """Ranks 0 and 1 share 8 tokens, rank 1 has 4 more: the pass takes what rank 1 does."""
    costs = Costs(source="test", forward=PassCost(token_s=1.0, pair_s=0.25), backward=PassCost(token_s=2.0))
    m = MicroBatch((Slice(0, 0, 8), Slice(1, 0, 4)), (0, 1), cp_comm="ring", cp_groups=((0, 1), (1,)))
    made = check(StepPlan(as_lengths([8, 4]), (m,), Limits(2, 10)))
    result = predict(made, costs)
    assert result.busy_s == (4 + 4 + 8, 8 + 4 + 2 + 16)
    assert result.step_s == 14 + 16
    again = check(replace(made, replayed=(0,), order=(ops("F0 B0"),)))
    # Nobody reads the keys of whole sequences: the forward runs once, right before its backward.
    assert predict(again, costs).busy_s == (8 + 8, 14 + 16)
    assert predict(again, costs).step_s == 14 + 16
