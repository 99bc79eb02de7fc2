"""Schedules of pipelines drawn by lot, with recomputation and weight gradients by the plan, against plain training."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from random import Random

import hypothesis.strategies as st
import pytest
from evenload.api import load_plugins
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.order import one_forward_one_backward
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.plan_json import step_json
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from harness.cases import only_full
from harness.proof import caught, random_pipeline
from hypothesis import HealthCheck, given, settings
from megatron_tests.exact import exact

pytestmark = pytest.mark.slow

LENGTHS = [37, 5, 64, 2]
LAYERS = 4
TWO = {"model__num_layers": 2}
WORDS = ("none", "some", "all")
LAYOUTS = {
    "pp2": (2, {"parallel__pp": 2}),
    "pp4": (4, {"parallel__pp": 4}),
    "pp2dp2": (4, {"parallel__pp": 2}),
    "pp2tp2": (4, {"parallel__tp": 2, "parallel__pp": 2}),
    "1 | 3 layers": (2, {"parallel__pp": 2, "parallel__layers": (1, 3)}),
    "2 | 1 | 1 layers, tied": (3, {"parallel__pp": 3, "parallel__layers": (2, 1, 1), "model__tied_embeddings": True}),
}


def drawn(seed, layout, lengths=LENGTHS, **how):
    size, changes = LAYOUTS[layout]
    stages = changes["parallel__pp"]
    ranks = size // stages // changes.get("parallel__tp", 1)
    draw = seed if isinstance(seed, Random) else Random(seed)
    layers = changes.get("parallel__layers", ())
    most = max(layers, default=LAYERS // stages)
    sizes = {"num_ranks": ranks, "num_stages": stages, "layers_per_stage": most, "layers": layers}
    return random_pipeline(draw, lengths, **sizes, **how)


def assert_exact(results, layout, lengths=LENGTHS):
    exact(results, LAYOUTS[layout][1], lengths)


def run(on_ranks, layout, plans, lengths=LENGTHS, **more):
    size, changes = LAYOUTS[layout]
    return on_ranks(size, "piped", plans=[step_json(plan) for plan in plans], lengths=lengths, **changes, **more)


def grid(layout):
    """Recomputation by weight gradients, each none, some and all; replays in some; and two plans of sixteen slices."""
    words = [(recompute, split) for recompute in WORDS for split in WORDS]
    plans = [drawn(10 + i, layout, recompute=r, split=w) for i, (r, w) in enumerate(words)]
    plans += [drawn(20 + i, layout, replay=replay, split="some") for i, replay in enumerate(("some", "all"))]
    return plans + [drawn(30 + i, layout, pieces=[1, 16], split="some", recompute="some") for i in range(2)]


def some(layout):
    """What two stages run of the grid at every change."""
    return [grid(layout)[i] for i in (2, 3, 5, 8, 10, 11)]


def few(layout):
    """What other layouts run at every change: some of both, and replays."""
    return [grid(layout)[i] for i in (4, 10)]


def test_the_drawn_schedules_hold_what_they_are_to_prove():
    plans = [*some("pp2"), *(plan for layout in LAYOUTS for plan in few(layout))]
    lengths = dict(enumerate(LENGTHS))

    def ops(plan, kind):
        return [op.micro_batch for op in plan.order[0] if op.kind == kind]

    def places(plan):
        for order in plan.order:
            place = {op: at for at, op in enumerate(order)}
            yield from (place[op] - place[Op("B", op.micro_batch)] for op in order if op.kind == "W")

    wanted = {
        "sixteen slices": lambda p: 16 in Counter(s.sequence for m in p.micro_batches for s in m.slices).values(),
        "slices beside whole sequences": lambda p: any(
            {s.length == lengths[s.sequence] for s in m.slices} == {True, False} for m in p.micro_batches
        ),
        "forwards in another order than launched": lambda p: ops(p, "F") != sorted(ops(p, "F")),
        "backwards in another order than forwards reversed": lambda p: ops(p, "B") != ops(p, "F")[::-1],
        "stages that interleave differently": lambda p: len(set(p.order)) > 1,
        "a W right behind its B": lambda p: 1 in places(p),
        "a W much later": lambda p: max(places(p), default=0) > 10,
        "some W at one stage": lambda p: any(0 < len(s) < len(p.micro_batches) for s in p.split),
        "all W": lambda p: all(len(s) == len(p.micro_batches) for s in p.split),
        "replays with W": lambda p: p.replayed and any(p.split),
        "layers recomputed by stage": lambda p: len(set(p.recompute)) > 1,
    }
    assert [name for name, holds in wanted.items() if not any(map(holds, plans))] == []


@pytest.mark.parametrize(
    ("layout", "plans"),
    [
        pytest.param("pp2", some, id="pp2"),
        *(pytest.param(layout, few, id=layout) for layout in ("pp4", "pp2dp2", "pp2tp2", "1 | 3 layers")),
        *(only_full(layout, grid, id=f"{layout}, all") for layout in LAYOUTS if "tied" not in layout),
    ],
)
def test_drawn_schedules_give_the_gradients_of_plain_training(on_ranks, layout, plans):
    assert_exact(run(on_ranks, layout, plans(layout)), layout)


def test_a_stage_has_the_layers_that_the_recipe_says(on_ranks):
    for layout in ("1 | 3 layers", "2 | 1 | 1 layers, tied"):
        (of_ranks,) = zip(*run(on_ranks, layout, [drawn(3, layout)]), strict=True)
        counts = [
            len({re.search(r"layers\.(\d+)", n).group(1) for n in r["names"] if ".layers." in n}) for r in of_ranks
        ]
        assert tuple(counts) == LAYOUTS[layout][1]["parallel__layers"]


@pytest.mark.parametrize("layout", ["pp2", only_full("pp4")])
def test_plans_whose_weight_gradients_fill_the_memory_are_exact_too(on_ranks, layout):
    """The planner's own, for a device that holds all: stages run far ahead, weight gradients wait long."""
    load_plugins()
    stages, lengths = LAYOUTS[layout][0], [37, 5, 64, 2, 30, 11, 48, 16]
    plans = []
    for extra, chunks in ((4, 64), (1, 64), (4, 1)):
        section = {"enabled": True, "max_tokens": 64, "max_extra": extra, "chunks": chunks}
        recipe = parse({"parallel": {"pp": stages}, "model": {"num_layers": LAYERS}, "plugins": {"pipeline": section}})
        chain = PlanChain.of_recipe(recipe, recipe.layout())
        limits = replace(chain.limits, splits_backward=True)
        plans.append(replace(chain, limits=limits).plan(as_lengths(lengths)))
    assert all(any(plan.split) for plan in plans)
    behind = [_passes_behind(order) for plan in plans for order in plan.order]
    assert max(behind) > 4
    assert_exact(run(on_ranks, layout, plans, lengths), layout, lengths)


def _passes_behind(order):
    """How many forwards and backwards run between a backward and its weight gradients, at most."""
    place, run, most = {}, 0, 0
    for op in order:
        if op.kind == "W":
            most = max(most, run - place[op.micro_batch])
            continue
        run += 1
        if op.kind == "B":
            place[op.micro_batch] = run
    return most


@settings(max_examples=max(2, settings.default.max_examples // 12), suppress_health_check=list(HealthCheck))
@given(
    draw=st.randoms(use_true_random=False),
    lengths=st.sampled_from([LENGTHS, [50, 3, 1, 27], [90, 7]]),
    replay=st.sampled_from(["none", "none", ""]),
)
def test_whatever_schedule_is_drawn(on_ranks, draw, lengths, replay):
    plans = [drawn(draw, "pp2", lengths, pieces=(1, 3, 16), replay=replay) for _ in range(3)]
    assert_exact(run(on_ranks, "pp2", plans, lengths), "pp2", lengths)


@pytest.mark.full
@settings(max_examples=max(1, settings.default.max_examples // 60), suppress_health_check=list(HealthCheck))
@given(draw=st.randoms(use_true_random=False))
def test_whatever_schedule_is_drawn_for_four_stages(on_ranks, draw):
    plans = [drawn(draw, "pp4", pieces=(1, 2, 8)) for _ in range(3)]
    assert_exact(run(on_ranks, "pp4", plans), "pp4")


@pytest.mark.parametrize("family", ["gpt", "qwen2"])
def test_biases_are_in_the_backward(on_ranks, family):
    plans = [drawn(1, "pp2", split="all", recompute="some")]
    assert_exact(run(on_ranks, "pp2", plans, model__family=family), "pp2")


def test_every_rank_of_an_overlapping_distributed_optimizer_has_its_shard_of_the_sum(on_ranks):
    size, changes = LAYOUTS["pp2dp2"]
    plans = [step_json(drawn(seed, "pp2dp2", split=split)) for seed, split in ((1, "all"), (2, "some"), (3, "none"))]
    for errors in on_ranks(
        size, "sharded", plans=plans, lengths=LENGTHS, megatron__overlap_grad_reduce=True, **changes
    ):
        assert max(errors) < 1e-9


def test_the_same_in_float32_with_the_distributed_optimizer(on_ranks):
    plans = [drawn(seed, "pp2dp2", split=split) for seed, split in ((1, "all"), (2, "some"))]
    more = {"train__dtype": "fp32", "megatron__overlap_grad_reduce": True}
    for rank in run(on_ranks, "pp2dp2", plans, **more):
        assert max(found["grad"] for found in rank) < 2e-6


def one_stage(seed, **how):
    return random_pipeline(Random(seed), LENGTHS, num_ranks=1, num_stages=1, layers_per_stage=2, **how)


FAULTS = {
    "no weight gradients": {"split": "some"},
    "empty W": {"split": "some"},
    "W twice": {"split": "some"},
    "inputs of another micro-batch": {"split": "some"},
    "dropped accumulator": {"split": "some"},
    "recomputed under another plan": {"recompute": "all"},
    "restarted positions": {"recompute": "some"},
}


def test_the_proof_catches_planted_faults(on_ranks):
    plans = {
        fault: [step_json(one_stage(seed, pieces=[1, 8], **how)) for seed in (1,)] for fault, how in FAULTS.items()
    }
    (found,) = on_ranks(1, "piped_under_faults", plans=plans, lengths=LENGTHS, **TWO)
    assert max(max(row["loss"], row["grad"]) for row in found[""]) < 1e-9
    for fault in FAULTS:
        assert caught([found[fault]]), fault


def test_the_proof_catches_a_gradient_that_tensor_parallel_ranks_did_not_sum(on_ranks):
    assert caught(run(on_ranks, "pp2tp2", [drawn(1, "pp2tp2", split="all")], mutant="dx of one rank"))


def test_spans_tell_every_pass_and_weights_are_multiplied_in_their_own(on_ranks):
    plan = drawn(4, "pp2", split="some", recompute="some")
    for stage, found in enumerate(on_ranks(2, "passes", plan=step_json(plan), lengths=LENGTHS, parallel__pp=2)):
        layers, count = LAYERS // 2, len(plan.split[stage])
        assert [(kind, number) for kind, number, _, _ in found["spans"]] == [*found["ops"], ("G", -1), ("U", -1)]
        times = [t for _, _, start, end in found["spans"] for t in (start, end)]
        assert times == sorted(times)
        assert found["busy"][0] > found["busy"][1]
        assert (found["B"], found["W"]) == (0, 4 * layers * count)
        assert found["attention"] == layers * len(plan.micro_batches) + sum(plan.recompute[stage])
        assert not found["patched"]


@pytest.mark.parametrize("tp", [only_full(1), 2])
def test_what_waits_for_a_weight_pass_is_what_the_limits_say(on_ranks, tp):
    """In float64: inputs of the linear layers and gradients of their outputs, whether layers were recomputed or not."""
    plan = drawn(5, "pp2", split="all", recompute="some")
    changes = {"parallel__pp": 2, "parallel__tp": tp}
    for found in on_ranks(2 * tp, "passes", plan=step_json(plan), lengths=LENGTHS, **changes):
        per_token = found["deferred_bytes_per_token"]
        assert dict(found["held"]) == {i: per_token * m.num_tokens for i, m in enumerate(plan.micro_batches)}


def test_what_was_sent_is_freed_in_time_also_between_weight_passes(on_ranks):
    """1F1B of twelve packs, each W two backwards late: a W takes nothing from a link."""
    packs = tuple(MicroBatch((Slice(i, 0, 4),), (0,)) for i in range(12))
    orders = []
    for ahead in (1, 0):
        ops = []
        for op in one_forward_one_backward(range(12), ahead):
            late = [Op("W", op.micro_batch - 2)] if op.kind == "B" and op.micro_batch > 1 else []
            ops += [op, *late]
        orders.append((*ops, Op("W", 10), Op("W", 11)))
    limits = Limits(1, 4, num_stages=2, layers_per_stage=2, splits_backward=True)
    plan = check(StepPlan(as_lengths([4] * 12), packs, limits, order=tuple(orders)))
    for found in on_ranks(2, "passes", plan=step_json(plan), lengths=[4] * 12, parallel__pp=2):
        assert (found["sent"], found["most"]) == (12, 2)
        assert not found["left_over"]


def test_a_step_after_one_that_failed_halfway_is_refused_and_takes_none_of_its_messages(on_ranks, world):
    """The first stage has sent three packs, of which the second has taken one."""
    packs = tuple(MicroBatch((Slice(i, 0, 4),), (0,)) for i in range(4))
    orders = tuple(tuple(one_forward_one_backward(range(4), ahead)) for ahead in (2, 0))
    plan = check(StepPlan(as_lengths([4] * 4), packs, Limits(1, 4, num_stages=2, layers_per_stage=2), order=orders))
    for first, *after in on_ranks(2, "after_an_error", plan=step_json(plan), lengths=[4] * 4, parallel__pp=2):
        assert first == "planted"
        assert ["the step before failed halfway" in text for text in after] == [True, True]
    world(2).close()  # its groups hold what nobody has taken


def test_layers_that_cannot_leave_weight_gradients_are_refused_before_any_pass(on_ranks):
    reasons = {
        "someone else's": "has been replaced by someone else",
        "a layer of another kind": "is in no column- or row-parallel layer",
        "fusion": "gradient_accumulation_fusion: ",
    }
    (told,) = on_ranks(1, "unsplittable", plan=step_json(one_stage(1, split="all")), lengths=LENGTHS, **TWO)
    assert told.keys() == reasons.keys()
    for why, text in told.items():
        assert reasons[why] in text
        assert "plugins.pipeline.split_backward=off" in text
