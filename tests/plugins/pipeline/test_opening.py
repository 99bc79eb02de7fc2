"""Small chunks first: every token once, growing, under the caps, and faster where stages would wait for the first."""

from itertools import pairwise

import numpy as np
from evenload.core.costs.context import PlanningContext
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.laws import check
from evenload.core.machine.cluster import load
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.setting import RECIPES
from evenload.core.simulate.step import simulate
from evenload.plugins.pipeline import plan as planner
from evenload.plugins.pipeline.chunks import chunkings, price_of
from evenload.plugins.pipeline.config import PipelineConfig
from evenload.plugins.pipeline.elastic import ordered
from evenload.plugins.pipeline.opening import START, opened
from hypothesis import given
from hypothesis import strategies as st

from ..chains import chain_of

FORWARD = PassCost(launch_s=100.0, token_s=1.0, pair_s=0.01)
BACKWARD = PassCost(launch_s=200.0, token_s=2.0, pair_s=0.025)
COSTS = Costs(source="made up", forward=FORWARD, backward=BACKWARD)
CLUSTER = load("a100", RECIPES / "clusters")


def context(stages, ranks=1):
    return PlanningContext(COSTS, Layout(pp=stages, dp=ranks), CLUSTER)


def packed(count):
    """So many micro-batches of twenty sequences of 50 tokens."""
    packs = [tuple(Slice(i, 0, 50) for i in range(k, k + 20)) for k in range(0, 20 * count, 20)]
    limits = Limits(num_ranks=1, max_tokens=1000, num_stages=8)
    return StepPlan(as_lengths([50] * 20 * count), tuple(MicroBatch(slices, (0,)) for slices in packs), limits)


def whole(lengths, stages, cap):
    """Every sequence a micro-batch on one rank."""
    packs = tuple(MicroBatch((Slice(i, 0, n),), (0,)) for i, n in enumerate(lengths))
    return StepPlan(as_lengths(lengths), packs, Limits(num_ranks=1, max_tokens=cap, num_stages=stages))


def chunk_seconds(plan, stages):
    price = price_of(context(stages))
    return [sum(float(price.seconds(s.length, s.start)) for s in m.slices) for m in plan.micro_batches]


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(64, 1500),
    st.sampled_from([2, 64]),
    st.sampled_from([2, 4, 16]),
)
def test_every_token_stays_once_in_order_under_the_caps(lengths, ranks, cap, most, stages):
    limits = Limits(num_ranks=ranks, max_tokens=cap, num_stages=stages)
    config = PipelineConfig(chunks=most, max_tokens=cap)
    for chunked in chunkings(StepPlan(as_lengths(lengths), (), limits), limits, context(stages, ranks), config):
        plan = opened(chunked, context(stages, ranks), config)
        if plan is None:
            continue
        check(ordered(plan, context(stages, ranks)))
        reached = [0] * len(lengths)
        for m in plan.micro_batches:
            for s in m.slices:
                assert s.start == reached[s.sequence]
                reached[s.sequence] = s.stop
        assert reached == lengths
        counts = [sum(s.sequence == i for m in plan.micro_batches for s in m.slices) for i in range(len(lengths))]
        assert all(c <= max(most, -(-n // (cap - cap % 4)) + 1) for c, n in zip(counts, lengths, strict=True))


def test_short_sequences_open_the_step_in_packs_that_grow():
    before = packed(20)
    plan = opened(before, context(8), PipelineConfig())
    largest_s = max(chunk_seconds(before, 8))
    each = chunk_seconds(plan, 8)
    grown = next(k for k, seconds in enumerate(each) if seconds >= largest_s * 0.99)
    assert 3 <= grown <= 12
    assert all(a <= b for a, b in pairwise(each[:grown]))
    assert each[0] <= 1.5 * START * largest_s
    assert max(each) <= largest_s * 1.01
    assert len(each) < 20 + grown


def test_where_weight_gradients_do_not_run_apart_short_sequences_close_the_step_too():
    before = packed(40)
    plan = opened(before, context(8), PipelineConfig(), closes=True)
    each, largest_s = chunk_seconds(plan, 8), max(chunk_seconds(before, 8))
    for side in (each, each[::-1]):
        assert side[0] <= 1.5 * START * largest_s
        assert all(a <= b for a, b in pairwise(side[:4]))
    assert sum(m.num_tokens for m in plan.micro_batches) == 800 * 50


def test_sequences_that_are_alone_open_the_step_in_more_slices_as_far_as_settings_let_them():
    before = whole([1000] * 16, 8, 1000)
    plan = opened(before, context(8), PipelineConfig())
    parts = [sum(s.sequence == i for m in plan.micro_batches for s in m.slices) for i in range(16)]
    assert parts[0] > parts[1] >= parts[2]
    assert parts[-8:] == [1] * 8
    two = opened(before, context(8), PipelineConfig(chunks=2))
    assert max(sum(s.sequence == i for m in two.micro_batches for s in m.slices) for i in range(16)) == 2
    assert opened(before, context(8), PipelineConfig(chunks=1)) is None


def test_what_is_padded_or_empty_stays():
    before = whole([1000] * 16, 8, 1000)
    padded = before.revised(micro_batches=(before.micro_batches[0]._replace(pad_to=1000), *before.micro_batches[1:]))
    assert opened(padded, context(8), PipelineConfig()) is None
    dummy = before.revised(micro_batches=(*before.micro_batches, MicroBatch((), (0,))))
    assert opened(dummy, context(8), PipelineConfig()) is None


def test_a_deep_pipeline_is_faster_with_small_chunks_first(monkeypatch):
    data = {
        "model": {"num_layers": 16, "hidden_size": 2048, "num_attention_heads": 16},
        "parallel": {"pp": 8},
        "cluster": "h200",
        "train": {"dtype": "bf16", "global_batch_size": 4096},
        "plugins": {"pipeline": {"enabled": True, "max_tokens": 8192}},
    }
    chain = chain_of(data)
    lengths = as_lengths(np.random.default_rng(0).lognormal(np.log(700), 1.0, 64).clip(2, 16384).astype(np.int64))

    def step_s():
        return simulate(chain.plan(lengths), chain.context, record=False).step_s

    with_opening = step_s()
    monkeypatch.setattr(planner, "opened", lambda *_, **__: None)
    assert with_opening < 0.985 * step_s()
