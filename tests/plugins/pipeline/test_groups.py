"""Which chunks form one pipeline: each in one of them, with its sequence; more pipelines where that spares layers."""

from dataclasses import replace

import numpy as np
import pytest
from evenload.core.costs.context import PlanningContext
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.plugins.pipeline.config import PipelineConfig
from evenload.plugins.pipeline.groups import grouped
from hypothesis import given
from hypothesis import strategies as st

from ..chains import device

CONFIG = PipelineConfig()
COSTS = Costs(source="test", forward=PassCost(token_s=1.0), backward=PassCost(token_s=2.0))
CHUNK = 10
LAYER_BYTES = CHUNK * 100.0


def chunked(chunks, room=float("inf"), ranks=1, stages=4):
    """Sequences of so many chunks of ten tokens; 100 bytes a token and layer, 5 layers a stage."""
    memory = MemoryCost(activation_bytes_per_token=5 * 100.0)
    limits = Limits(ranks, 1000, num_stages=stages, layers_per_stage=5, memory=memory, max_activation_bytes=room)
    micro_batches = [
        MicroBatch((Slice(i, CHUNK * k, CHUNK * (k + 1)),), (i % ranks,))
        for i, n in enumerate(chunks)
        for k in range(n)
    ]
    return StepPlan(as_lengths([CHUNK * n for n in chunks]), tuple(micro_batches), limits)


def context(ranks=1):
    return PlanningContext(COSTS, Layout(pp=4, dp=ranks), device())


def test_one_pipeline_where_memory_is_plenty():
    """Each one more would be filled and drained for nothing."""
    plan = chunked([8, 8, 4, 2, 1, 1, 1])
    assert grouped(plan, context(), CONFIG) == [list(range(25))]


def test_long_sequences_have_a_pipeline_of_their_own_where_they_would_make_all_others_recompute():
    """16 + 3 chunks in flight hold 95 layers, 1 + 3 only 20; there is room for 40.

    In one pipeline 116 chunks recompute 55 / 19 layers, 336 together; apart only the 16 of the long one do, 40 / 16
    layers. A layer takes 2 s; a pipeline more takes 3 * 30 s.
    """
    plan = chunked([16, *([1] * 100)], room=40 * LAYER_BYTES)
    assert grouped(plan, context(), CONFIG) == [list(range(16)), list(range(16, 116))]


def test_few_short_ones_are_not_worth_a_pipeline():
    plan = chunked([16, 1, 1], room=40 * LAYER_BYTES)
    assert grouped(plan, context(), CONFIG) == [list(range(18))]


def test_sequences_that_meet_in_a_chunk_stay_together():
    """The last chunk of the long sequence holds the first of a short one."""
    plan = chunked([4, 2, *([1] * 100)], room=22 * LAYER_BYTES)
    m = plan.micro_batches
    joined = MicroBatch((m[3].slices[0], m[4].slices[0]), (0,))
    plan = replace(plan, micro_batches=(*m[:3], joined, *m[5:]))
    groups = grouped(plan, context(), CONFIG)
    assert len(groups) == 2
    assert groups[0] == [0, 1, 2, 3, 4]


def test_a_run_costs_what_its_costliest_rank_does():
    """Rank 1 has no long sequence, and nothing to spare; rank 0 decides."""
    chunks = [16, 1, *([1, 1] * 60)]
    alone = grouped(chunked(chunks[::2], room=40 * LAYER_BYTES), context(), CONFIG)
    both = grouped(chunked(chunks, room=40 * LAYER_BYTES, ranks=2), context(2), CONFIG)
    assert len(alone) == len(both) == 2
    assert both[0] == list(range(16))


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=10),
    st.integers(1, 2),
    st.floats(1.0, 200.0),
    st.sampled_from(["auto", "off"]),
)
def test_every_chunk_is_in_one_pipeline_with_its_sequence(chunks, ranks, room, recompute):
    plan = chunked(chunks, room * LAYER_BYTES, min(ranks, len(chunks)))
    at = context(plan.limits.num_ranks)
    groups = grouped(plan, at, PipelineConfig(recompute=recompute))
    assert sorted(i for group in groups for i in group) == list(range(len(plan.micro_batches)))
    assert all(group == sorted(group) for group in groups)
    of = {i: number for number, group in enumerate(groups) for i in group}
    for sequence in range(len(chunks)):
        mine = {of[i] for i, m in enumerate(plan.micro_batches) if m.slices[0].sequence == sequence}
        assert len(mine) == 1
    longest = [max(chunks[plan.micro_batches[i].slices[0].sequence] for i in group) for group in groups]
    assert longest == sorted(longest, reverse=True)


@pytest.mark.parametrize("seed", range(4))
def test_permuted_sequences_form_the_same_pipelines(seed):
    random = np.random.default_rng(seed)
    chunks = [16, 12, 5, 3, *([1] * 40)]
    order = random.permutation(len(chunks))
    sizes = [
        [len(group) for group in grouped(chunked(row, room=40 * LAYER_BYTES), context(), CONFIG)]
        for row in (chunks, [chunks[i] for i in order])
    ]
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) > 1
