"""Halves of micro-batches that take turns: lawful, level, planned where they are faster, and nowhere else."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.costs.context import Direction
from evenload.core.costs.exposed import BESIDE, exposed_of_ranks, exposed_s
from evenload.core.errors import EvenloadError, PlanError
from evenload.core.laws import check
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.plan.token_layout import layout_of
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import certified_s, outcome_of
from evenload.core.recipe.recipe import parse
from evenload.core.recipe.traits import trainer_called
from evenload.plugins.mesh.candidates.halves import in_turns
from hypothesis import given, settings

LAYERS = 8
MODEL = {
    "vocab_size": 32000,
    "num_layers": LAYERS,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 11008,
}


def recipe_of(halves="auto", tp=8, dp=4, **sections):
    mesh = {"enabled": True, "max_tokens": 16384, "halves": halves}
    layout = {"tp": tp, "dp": dp, **sections.pop("parallel", {})}
    return parse(
        {
            "model": {**MODEL, **sections.pop("model", {})},
            "parallel": layout,
            "train": {"dtype": "bf16", "global_batch_size": 16},
            "data": {"max_length": 65536},
            "cluster": "h200",
            "plugins": {"packing": {"enabled": True, "max_tokens": 16384}, "mesh": mesh},
            **sections,
        }
    )


def chain_of(halves="auto", **changes):
    load_plugins()
    recipe = recipe_of(halves, **changes)
    return PlanChain.of_recipe(recipe, recipe.layout())


LENGTHS = st.lists(st.integers(1, 60000), min_size=1, max_size=24)


@settings(max_examples=settings.default.max_examples // 3)
@given(LENGTHS)
def test_a_plan_with_halves_is_lawful_and_no_slower(lengths):
    plain, turning = chain_of("off"), chain_of("auto")
    batch = as_lengths(lengths)
    plan = check(turning.plan(batch))
    step_s = outcome_of(plan, turning.context).step_s
    assert step_s <= outcome_of(plain.plan(batch), plain.context).step_s * (1 + 1e-9)
    assert certified_s(plan, turning.context) <= step_s * (1 + 1e-9)


@settings(max_examples=settings.default.max_examples // 3)
@given(LENGTHS)
def test_every_rank_has_enough_of_both_halves(lengths):
    chain = chain_of()
    plan = chain_of("off").plan(as_lengths(lengths))
    halved = in_turns(plan.revised(limits=replace(plan.limits, takes_turns=True)), chain.context)
    for m in halved.micro_batches if halved else ():
        if not m.first_half:
            continue
        seconds = [
            {
                rank: sum(float(chain.context.costs.both.seconds(p.length, p.start)) for p in pieces)
                for rank, pieces in layout_of(half).items()
            }
            for half in m.halves
        ]
        for rank in m.ranks if m.num_tokens > 4096 * len(m.ranks) else ():
            both = [of_half[rank] for of_half in seconds]
            assert max(both) <= 0.83 * sum(both), (m, rank)


def test_traffic_of_tensor_parallelism_hides_and_without_it_nothing_is_halved():
    lengths = as_lengths([60000, 30000, 9000, 8000, 4000, 4000, 2000, 900])
    plain, turning = chain_of("off"), chain_of("auto")
    plan = turning.plan(lengths)
    assert all(m.first_half for m in plan.micro_batches)
    before, after = (outcome_of(c.plan(lengths), c.context) for c in (plain, turning))
    assert after.passes_s < 0.95 * before.passes_s
    alone = chain_of("auto", tp=1, dp=4).plan(lengths)
    assert not any(m.first_half for m in alone.micro_batches)
    assert not any(m.first_half for m in plain.plan(lengths).micro_batches)


def test_what_the_other_half_computes_hides_traffic_and_pays_for_it():
    context = chain_of().context
    whole = MicroBatch((Slice(0, 0, 8192), Slice(1, 0, 8192)), (0,))
    halved = whole._replace(first_half=1)
    direction = Direction(context.costs.forward, 1)
    travel = exposed_s(context, direction, whole)
    each = [exposed_s(context, direction, half) for half in halved.halves]
    compute = float(context.costs.forward.seconds(8192))
    hidden = 2 * min(each[0], compute)
    open_s = sum(each) - (1 - BESIDE - 1 / LAYERS) * hidden
    assert exposed_s(context, direction, halved) == pytest.approx(open_s)
    assert exposed_of_ranks(context, direction, halved).tolist() == pytest.approx([open_s])
    assert travel <= sum(each) <= travel * 1.25  # each half has latencies of its own
    assert context.costs.micro_batch_s(halved)[0] == pytest.approx(
        context.costs.micro_batch_s(whole)[0] + context.costs.forward.launch_s
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": {"pp": 2}}, "without pipeline stages"),
        (
            {"model": {"family": "mixtral", "moe": {"num_experts": 8, "topk": 2}}, "tp": 1},
            "without pipeline stages and experts",
        ),
        ({"trainer": "deepspeed", "tp": 1}, "under this trainer"),
    ],
    ids=["stages", "experts", "deepspeed"],
)
def test_where_halves_cannot_take_turns_the_recipe_is_refused(changes, words):
    with pytest.raises(EvenloadError, match=words):
        chain_of(**changes)
    chain_of("off", **changes)


def test_loops_that_nobody_edits_refuse_them():
    load_plugins()
    recipe = recipe_of()
    shape = __import__("evenload.core.recipe.sizes", fromlist=["shape_of"]).shape_of(recipe.model)
    traits = trainer_called("megatron").traits(recipe)
    with pytest.raises(EvenloadError, match="in a loop of your own"):
        PlanChain.of_model(recipe, shape, recipe.layout(), traits, warn=False)


def by_hand(limits, **changes):
    cut = MicroBatch((Slice(0, 0, 40), Slice(0, 40, 64)), (0,), first_half=1)
    plan = StepPlan(as_lengths([64]), (cut,), limits, order=((Op("F", 0), Op("B", 0)),))
    return replace(plan, **changes)


def test_laws_of_halves():
    limits = replace(chain_of().limits, num_ranks=1)
    check(by_hand(limits))
    m = by_hand(limits).micro_batches[0]
    broken = {
        "all runs at once": by_hand(replace(limits, takes_turns=False)),
        "the host's own schedule": by_hand(limits, order=()),
        "two slices of one sequence": by_hand(
            limits,
            micro_batches=(MicroBatch((Slice(0, 0, 30), Slice(0, 30, 40), Slice(0, 40, 64)), (0,), first_half=2),),
        ),
        "out of order": by_hand(limits, micro_batches=(m._replace(slices=m.slices[::-1]),)),
        "no token": by_hand(limits, micro_batches=(m._replace(first_half=2),)),
    }
    for words, plan in broken.items():
        with pytest.raises(PlanError, match=words):
            check(plan)


def test_halves_tell_plans_apart():
    limits = chain_of().limits
    whole = StepPlan(as_lengths([8, 8]), (MicroBatch((Slice(0, 0, 8), Slice(1, 0, 8)), (0,)),), limits)
    halved = replace(whole, micro_batches=(whole.micro_batches[0]._replace(first_half=1),))
    assert whole.digest != halved.digest
    assert math.isclose(np.sum([half.num_tokens for half in halved.micro_batches[0].halves]), 16)
