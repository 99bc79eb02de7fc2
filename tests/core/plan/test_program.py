"""What every rank of every stage runs of a plan: laws of all programs, and that the simulator charges no other work."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from evenload.core.costs.context import PlanningContext
from evenload.core.costs.costs import Costs, PassCost, rank_works
from evenload.core.errors import PlanError
from evenload.core.laws import check
from evenload.core.machine.cluster import Link
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits
from evenload.core.plan.program import lower
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.simulate.step import simulate
from hypothesis import assume, given
from hypothesis import strategies as st

from ..by_hand import nodes, ops


@st.composite
def plans(draw):
    """Anything lawful: cuts, packs, replays, groups of their own in backward, shared micro-batches, stages."""
    from harness.proof.drawn import random_plan, random_shared_plan

    lengths, seed = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6)), draw(st.integers(0, 10**6))
    sizes = {"num_ranks": draw(st.integers(1, 4)), "num_stages": draw(st.integers(1, 3)), "layers_per_stage": 2}
    if draw(st.booleans()):
        return random_shared_plan(seed, lengths, **sizes, heads=4)
    return random_plan(seed, lengths, **sizes)


def _programs(plan):
    limits = plan.limits
    return [[lower(plan, stage, rank) for rank in range(limits.num_ranks)] for stage in range(limits.num_stages)]


@given(plans())
def test_every_token_has_its_loss_and_its_backward_once(plan):
    for stage in _programs(plan):
        for kinds in (("forward", "recompute_forward"), ("backward",)):
            runs = {(a.op, a.micro_batch) for program in stage for a in program if a.kind in kinds}
            tokens = Counter((s.sequence, t) for _, m in runs for s in m.slices for t in range(s.start, s.stop))
            assert tokens == {(i, t): 1 for i, n in enumerate(plan.lengths.tolist()) for t in range(n)}


@given(plans())
def test_every_key_that_is_read_was_written_once_and_in_order(plan):
    """A store like the runtime's: a slice asks for all keys before it, and writes those that are not there. A rank that
    joins a ring gets those before it from the others."""
    lengths = plan.lengths.tolist()
    places = [pair for m in plan.micro_batches for pair in zip(m.slices, m.ranks_of_slices, strict=True)]
    ranks_before = {(s.sequence, s.stop): ranks for s, ranks in places}
    for stage in _programs(plan):
        for rank, program in enumerate(stage):
            written = Counter()
            for action in program:
                m = action.micro_batch
                runs = action.computes and action.kind != "weight_grads"
                for s, ranks in zip(m.slices, m.ranks_of_slices, strict=True) if runs else ():
                    if s.sequence not in plan.cut or rank not in ranks:
                        continue
                    if action.kind == "backward":
                        assert written[s.sequence] == lengths[s.sequence]
                    elif s.stop > written[s.sequence]:
                        joins = s.start and rank not in ranks_before.get((s.sequence, s.start), (rank,))
                        assert joins or s.start == written[s.sequence], (action, s)
                        written[s.sequence] = s.stop


@given(plans())
def test_sends_match_receives(plan):
    for before, behind in pairwise(_programs(plan)):
        for up, down in zip(before, behind, strict=True):
            for kind, source, target in (("F", up, down), ("B", down, up)):
                sent = [a.op for a in source if a.kind == "send" and a.op.kind == kind]
                assert sent == [a.op for a in target if a.kind == "receive" and a.op.kind == kind]


@given(plans())
def test_every_graph_every_input_and_every_weight_gradient_is_used_once(plan):
    for number, stage in enumerate(_programs(plan)):
        for program in stage:
            made = [a.graph for a in program if a.kind in ("forward", "recompute_forward")]
            used = [a.graph for a in program if a.kind == "backward"]
            assert sorted(made) == sorted(used) == sorted(set(used))
            kept = Counter(t for a in program if a.kind == "keep_input" for t in _tokens(a))
            taken = Counter(t for a in program if a.kind == "recompute_forward" for t in _tokens(a))
            assert kept == (taken if number else Counter())
            deferred = sorted(a.graph for a in program if a.kind == "backward" and a.defers_wgrad)
            assert deferred == sorted(a.graph for a in program if a.kind == "weight_grads")


def _tokens(action):
    return [(s.sequence, t) for s in action.micro_batch.slices for t in range(s.start, s.stop)]


COSTS = Costs(
    source="test",
    forward=PassCost(launch_s=0.5, token_s=1.0, pair_s=0.01),
    backward=PassCost(launch_s=1.0, token_s=2.0, pair_s=0.025),
)
HEAD = 0.25
FAST = Link(latency_s=0.0, bytes_per_s=1e9)


@given(plans())
def test_the_simulator_charges_what_the_programs_compute(plan):
    """Shared micro-batches of one stage, whole ones of any: docs/log.md has what differs between stages."""
    limits = plan.limits
    assume(limits.num_stages == 1 or all(len(m.ranks) == 1 for m in plan.micro_batches))
    layout = Layout(dp=limits.num_ranks, pp=limits.num_stages)
    context = PlanningContext(COSTS, layout, nodes(64, FAST, memory_bytes=1e12), head_frac=HEAD)
    wanted = np.array(
        [
            [sum(_seconds(plan, stage, rank, a) for a in lower(plan, stage, rank)) for rank in range(limits.num_ranks)]
            for stage in range(limits.num_stages)
        ]
    )
    assert simulate(plan, context, record=False).busy_s == pytest.approx(wanted)


def _seconds(plan, stage, rank, action):
    """Of an action: launch, layers, head at the last stage, layers that run again."""
    if action.kind not in ("forward", "forward_kv", "recompute_forward", "backward"):
        return 0.0
    cost = COSTS.backward if action.kind == "backward" else COSTS.forward
    _, tokens, pairs = rank_works(action.micro_batch)[rank]
    stages = plan.limits.num_stages
    heads = (stages if stage == stages - 1 else 0) if action.kind != "forward_kv" else 0
    seconds = cost.launch_s + cost.token_s * tokens * (1 - HEAD + HEAD * heads) + cost.pair_s * pairs
    again = (action.recomputed or 0) / plan.limits.layers_per_stage
    return seconds + again * (COSTS.forward.token_s * tokens * (1 - HEAD) + COSTS.forward.pair_s * pairs)


def _chain(replayed, num_stages=1):
    """Two slices of a sequence, each beside a whole one, on one rank."""
    slices = ((Slice(0, 0, 4), Slice(1, 0, 2)), (Slice(0, 4, 8), Slice(2, 0, 2)))
    order = (ops("F0 F1 B1 B0"),) * num_stages
    limits = Limits(1, 10, num_stages=num_stages, layers_per_stage=2)
    micro_batches = tuple(MicroBatch(two, (0,)) for two in slices)
    return check(StepPlan(as_lengths([8, 2, 2]), micro_batches, limits, order, replayed=replayed))


def _told(plan, stage):
    return [f"{a.kind} {a.op.kind}{a.op.micro_batch}" for a in lower(plan, stage, 0)]


def test_a_forward_runs_what_a_replay_reads_and_does_not_write():
    plan = _chain((0, 1))
    assert _told(plan, 0) == [
        "forward_kv F0",
        "recompute_forward B1",
        "backward B1",
        "recompute_forward B0",
        "backward B0",
    ]
    assert lower(plan, 0, 0)[0].micro_batch.slices == (Slice(0, 0, 4),)


def test_other_stages_run_whole_forwards_for_the_next_one():
    plan = _chain((0, 1), num_stages=2)
    first = lower(plan, 0, 0)
    assert [a.micro_batch for a in first if a.kind == "forward_kv"] == list(plan.micro_batches)
    assert _told(plan, 0)[:4] == ["forward_kv F0", "send F0", "forward_kv F1", "send F1"]
    assert _told(plan, 1) == [
        *("receive F0", "keep_input F0", "forward_kv F0", "receive F1", "keep_input F1"),
        *("recompute_forward B1", "backward B1", "send B1", "recompute_forward B0", "backward B0", "send B0"),
    ]


def test_a_shared_micro_batch_that_runs_whole_brings_its_prefix():
    """A slice that a shared forward cannot leave out needs the ones before it, whatever its own replay would write."""
    whole, ring = [Slice(0, 0, 8), Slice(1, 0, 8)], {"cp_comm": "ring", "cp_groups": ((0, 1), (0,))}
    forward = (
        MicroBatch((Slice(1, 0, 4),), (0,)),
        MicroBatch((Slice(0, 0, 4), Slice(1, 4, 8)), (0, 1), **ring),
        MicroBatch((Slice(0, 4, 8),), (0, 1), cp_comm="ring"),
    )
    order = (ops("F0 F1 F2 B2 B1 B0"),)
    limits = Limits(2, 16, layers_per_stage=2)
    plan = check(StepPlan(as_lengths([s.length for s in whole]), forward, limits, order, replayed=(0, 1, 2)))
    runs = [a for a in lower(plan, 0, 0) if a.kind == "forward_kv"]
    assert [a.micro_batch for a in runs] == list(forward[:2])


@pytest.mark.parametrize(
    ("place", "found"),
    [((2, 0), "pipeline stage 2 of 2"), ((-1, 0), "pipeline stage -1 of 2"), ((0, 1), "rank 1 of 1")],
)
def test_a_stage_or_rank_that_is_not_there_is_refused(place, found):
    with pytest.raises(PlanError) as caught:
        lower(_chain((), num_stages=2), *place)
    assert caught.value.found == found
    assert caught.value.what
    assert caught.value.do


def test_ranks_in_step_have_one_stage():
    with pytest.raises(PlanError, match="no pipeline stages"):
        lower(_chain((), num_stages=2), 0, 0, "in step")


def test_a_rank_without_work_runs_a_dummy_where_the_trainer_wants_one():
    plan = check(StepPlan(as_lengths([4]), (MicroBatch((Slice(0, 0, 4),), (0,)),), Limits(2, 4)))
    assert lower(plan, 0, 1) == ()
    assert [(a.kind, a.op.micro_batch, a.cell) for a in lower(plan, 0, 1, "idle")] == [
        ("forward", -1, "F-"),
        ("backward", -1, "B-"),
    ]
    assert [a.kind for a in lower(plan, 0, 1, "in step")] == ["forward", "backward"]
