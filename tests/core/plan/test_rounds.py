"""Plans in rounds: lawful, the same work, every group in step at every stage; and what the laws refuse without them."""

from dataclasses import replace

import pytest
from evenload.core.errors import PlanError
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.order import in_slots, orders_of_stage
from evenload.core.plan.program import exchanges, forwards_that_run, lower
from evenload.core.plan.rounds import in_rounds
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.simulate.events import play
from hypothesis import given
from hypothesis import strategies as st

from ..by_hand import alone, ops

LAYERS = 4


def each_alone(*lengths_of_ranks, in_step, stages=1):
    """A whole sequence in each micro-batch, in the trainer's own schedule."""
    ranks, lengths = zip(*((rank, n) for rank, row in enumerate(lengths_of_ranks) for n in row), strict=True)
    limits = Limits(len(lengths_of_ranks), 1 << 20, stages, LAYERS, in_step)
    return StepPlan(as_lengths(lengths), alone(lengths, ranks), limits)


def test_ranks_of_a_group_get_dummies_up_to_its_most_micro_batches_and_other_groups_none():
    plan = in_rounds(each_alone((5, 4), (3,), (2,), (1,), in_step=2))
    counts = [len(plan.of_rank(rank)) for rank in range(4)]
    assert counts == [2, 2, 1, 1]
    assert [m.ranks for m in plan.micro_batches if not m.slices] == [(1,)]
    assert in_rounds(check(plan)) is plan


def test_unlike_counts_orders_replays_and_recomputed_layers_break_a_law_and_rounds_mend_them():
    limits = Limits(4, 100, 1, LAYERS, in_step=2)
    plan = StepPlan(as_lengths([8] * 8), alone([8] * 8, [i % 4 for i in range(8)]), limits)
    others = "F2 B2 F6 B6 F3 B3 F7 B7"
    broken = {
        "order": replace(plan, order=(ops(f"F0 F4 B0 B4 F1 B1 F5 B5 {others}"),)),
        "replay": replace(plan, order=(ops(f"F0 F4 B4 B0 F1 F5 B5 B1 {others}"),), replayed=(4,)),
        "layers": replace(
            plan, order=(ops(f"F0 B0 F4 B4 F1 B1 F5 B5 {others}"),), recompute=((0, 0, 0, 0, 2, 0, 0, 0),)
        ),
    }
    for one in broken.values():
        with pytest.raises(PlanError, match="run different passes"):
            check(one)
        check(in_rounds(one))
    assert in_rounds(broken["replay"]).replayed == (4, 5)
    assert in_rounds(broken["layers"]).recompute == ((0, 0, 0, 0, 2, 2, 0, 0),)
    with pytest.raises(PlanError, match="run different passes"):
        check(each_alone((5, 4), (3,), (2,), (1,), in_step=2))


def test_backwards_of_a_group_are_those_of_one_round_of_forwards():
    """What came from a rank in a forward goes back to it in the backward, so that both must have run it together."""
    plan = StepPlan(as_lengths([8] * 4), alone([8] * 4, [0, 1, 0, 1]), Limits(2, 100, 1, LAYERS, in_step=2))
    crossed = replace(plan, order=(ops("F0 F2 B0 B2 F1 F3 B3 B1"),))
    with pytest.raises(PlanError, match=r"pass 2 is the backward of pass 0, .* the backward of pass 1"):
        check(crossed)
    check(replace(crossed, limits=replace(plan.limits, in_step=1)))
    rounds = check(in_rounds(crossed))
    assert not rounds.replayed


def test_dummies_run_backward_beside_what_they_ran_forward_beside():
    """A chain of slices runs backward from its end, where a shorter one of a peer has a dummy."""
    batches = tuple(MicroBatch((Slice(0, 4 * k, 4 * k + 4),), (0,)) for k in range(3))
    limits = Limits(2, 100, 1, LAYERS, in_step=2)
    plan = StepPlan(as_lengths([12, 5]), (*batches, MicroBatch((Slice(1, 0, 5),), (1,))), limits)
    rounds = check(in_rounds(replace(plan, order=(ops("F0 F1 F2 B2 B1 B0 F3 B3"),))))
    assert not rounds.replayed
    assert [op.micro_batch for op in orders_of_stage(rounds, 0)[1]] == [3, 4, 5, 5, 4, 3]


def test_a_forward_that_one_rank_may_skip_runs_where_its_peer_cannot():
    """A cut sequence that is replayed needs its first slice forward; a whole one that is replayed needs nothing."""
    limits = Limits(4, 100, 1, LAYERS, in_step=2)
    cut = (MicroBatch((Slice(0, 0, 4),), (0,)), MicroBatch((Slice(0, 4, 8),), (0,)))
    whole = tuple(MicroBatch((Slice(i, 0, 8),), (1,)) for i in (1, 2))
    rest = tuple(MicroBatch((), (rank,)) for rank in (2, 3))
    plan = StepPlan(as_lengths([8] * 3), (*cut, *whole, *rest), limits, replayed=(0, 2))
    plan = check(replace(plan, order=(ops("F0 F1 B1 B0 F2 F3 B3 B2 F4 B4 F5 B5"),)))
    assert forwards_that_run(plan, True)[2] == MicroBatch((), (1,))
    alone = replace(plan, limits=replace(limits, in_step=1))
    assert forwards_that_run(alone, True)[2] is None
    assert exchanges(lower(alone, 0, 0)) != exchanges(lower(alone, 0, 1))
    assert exchanges(lower(plan, 0, 0)) == exchanges(lower(plan, 0, 1))


@st.composite
def plans(draw):
    """Chains of slices on each rank, each rank in an order of its own; no two ranks in step but by chance."""
    size, groups = draw(st.sampled_from([(2, 2), (3, 1), (2, 1), (4, 2)]))
    stages = draw(st.integers(1, 3))
    lengths = []
    batches = []
    order = [[] for _ in range(stages)]
    replayed = []
    for rank in range(size * groups):
        forward = []
        backward = []
        need = []
        for parts in draw(st.lists(st.integers(1, 3), max_size=4)):
            first = len(batches)
            batches += [MicroBatch((Slice(len(lengths), 2 * k, 2 * k + 2),), (rank,)) for k in range(parts)]
            lengths.append(2 * parts)
            forward += range(first, first + parts)
            backward += range(first + parts - 1, first - 1, -1)
            need += [len(forward)] * parts
            replayed += [i for i in range(first, first + parts - 1) if draw(st.booleans())]
        if not forward:
            batches.append(MicroBatch((), (rank,)))
            forward, backward, need = [len(batches) - 1], [len(batches) - 1], [1]
        for stage, row in enumerate(order):
            row += in_slots(forward, backward, need, stages - 1 - stage)
    limits = Limits(size * groups, 100, stages, LAYERS, in_step=size)
    recompute = [[draw(st.integers(0, LAYERS)) for _ in batches] for _ in range(stages)] if draw(st.booleans()) else []
    plan = StepPlan(as_lengths(lengths), tuple(batches), limits, replayed=tuple(replayed))
    return replace(plan, order=tuple(map(tuple, order)), recompute=tuple(map(tuple, recompute)))


@given(plans())
def test_any_plan_in_rounds_is_lawful_and_does_the_same_work(plan):
    check(replace(plan, limits=replace(plan.limits, in_step=1)))
    rounds = in_rounds(plan)
    check(rounds)
    assert [m for m in rounds.micro_batches if m.slices] == [m for m in plan.micro_batches if m.slices]
    assert set(plan.replayed) <= set(rounds.replayed)
    assert in_rounds(rounds).order == rounds.order
    size = plan.limits.in_step
    for event in play(rounds, lambda stage, op: 1.0 + rounds.micro_batches[op.micro_batch].ranks[0]):
        # The slowest of a group sets the time of all of them.
        slowest = max(event.ranks[0] // size * size + size - 1, 0) + 1.0
        assert event.free_s - event.start_s == pytest.approx(slowest)
