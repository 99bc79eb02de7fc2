"""Sequences on single ranks beside shared ones: dealt anew they break no law, and level what the simulator predicts."""

import numpy as np
from evenload.core.laws import check
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.judge import outcome_of
from evenload.plugins.mesh.candidates.levelled import levelled
from hypothesis import given
from hypothesis import strategies as st

from ...chains import chain_of

RANKS, CAP = 8, 4096


MESH = chain_of(
    {
        "parallel": {"dp": RANKS},
        "plugins": {"mesh": {"enabled": True, "max_tokens": CAP}},
        "costs": "verl-7b",
        "cluster": "h200",
        "train": {"dtype": "bf16"},
    }
)


def plan_of(shared, alone):
    """One sequence on half of the ranks in a ring, and a micro-batch of others on each rank that has any."""
    lengths, ranks = [shared, *(length for own in alone for length in own)], tuple(range(RANKS // 2))
    micro_batches, next_one = [MicroBatch((Slice(0, 0, shared),), ranks, cp_comm="ring")], 1
    for rank, own in enumerate(alone):
        slices = tuple(Slice(next_one + i, 0, length) for i, length in enumerate(own))
        next_one += len(own)
        micro_batches += [MicroBatch(slices, (rank,))] if own else []
    return check(StepPlan(as_lengths(lengths), tuple(micro_batches), MESH.caps))


@given(
    st.integers(64, 4 * CAP // 2),
    st.lists(st.lists(st.integers(8, CAP // 8), max_size=8), min_size=RANKS, max_size=RANKS),
)
def test_what_is_dealt_anew_breaks_no_law_and_moves_nothing_shared(shared, alone):
    plan = plan_of(shared, alone)
    for again in levelled(plan, MESH.context):
        check(again)
        assert [m.ranks for m in again.micro_batches] == [m.ranks for m in plan.micro_batches]
        assert again.micro_batches[0] == plan.micro_batches[0]
        assert outcome_of(again, MESH.context).step_s < outcome_of(plan, MESH.context).step_s


def test_ranks_without_a_shared_sequence_take_more_of_the_others():
    own = [int(length) for length in np.random.default_rng(1).integers(100, 400, 6)]
    plan = plan_of(2 * CAP, [own] * RANKS)
    (again,) = levelled(plan, MESH.context)
    before, after = (outcome_of(one, MESH.context) for one in (plan, again))
    loads = (after.busy_s + after.exposed_s)[0]
    assert before.step_s > 1.2 * after.step_s
    assert loads.max() <= 1.02 * loads.mean()


def test_the_token_cap_holds_where_levelling_would_break_it():
    full = [[CAP // 4] * 4] * RANKS
    plan = plan_of(2 * CAP, [[64, 64], *full[1:]])
    for again in levelled(plan, MESH.context):
        assert max(m.num_tokens for m in again.micro_batches if len(m.ranks) == 1) <= CAP
