"""Stages of unequal numbers of layers: each is what it is in a pipeline whose stages all have as many."""

from dataclasses import replace

import numpy as np
import pytest
from evenload.core.costs.memory import levels_of_stage
from evenload.core.plan_json import read_step, step_json
from evenload.core.simulate.passes import PassTimes
from evenload.core.simulate.predict import predict
from evenload.core.simulate.step import simulate

from ..balance.drawn_plans import drawn

SEEDS = [seed for seed in range(120) if drawn(seed, unequal=True).plan.limits.layers][:60]


def equal(plan, context, stage):
    """The same plan where every stage has the layers of this one, as many stages, and the output layer as it is."""
    limits, count, h = plan.limits, plan.limits.num_stages, context.head_frac
    own = limits.layers[stage]
    share = own * count / sum(limits.layers)
    costs = context.costs
    head = {name: count * h * getattr(costs, name).token_s for name in ("forward", "backward")}
    passes, fracs = {}, {}
    for name in ("forward", "backward"):
        cost = getattr(costs, name)
        token_s = share * (1 - h) * cost.token_s + head[name] / count
        fracs[name] = head[name] / count / token_s
        passes[name] = cost.model_copy(
            update={"token_s": token_s, "launch_s": cost.launch_s * share, "pair_s": cost.pair_s * share}
        )
    assert fracs["forward"] == pytest.approx(fracs["backward"])
    one_layer = {"activation", "cut_saves", "kv", "kv_grad", "replay", "deferred"}
    bytes_of = {f"{name}_bytes_per_token": 1.0 for name in one_layer} | {"gradient_bytes": 1.0}
    memory = limits.memory.model_copy(update={n: share * getattr(limits.memory, n) for n in bytes_of})
    again = tuple(tuple(min(own, n) for n in row) for row in plan.recompute)
    again = tuple(plan.recompute[stage] if at == stage else row for at, row in enumerate(again))
    there = replace(limits, layers=(), layers_per_stage=own, memory=memory)
    traffic = replace(context.traffic, layers=own)
    layout = replace(context.layout, layers=())
    costs = costs.model_copy(update={**passes, "memory": memory})
    return (
        plan.revised(limits=there, recompute=again),
        replace(context, costs=costs, head_frac=fracs["forward"], layout=layout, traffic=traffic),
    )


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_seconds_of_a_stage_are_those_of_its_layers(recompute):
    for seed in SEEDS:
        plan, context = drawn(seed, unequal=True, recompute=recompute)
        if not plan.limits.layers:
            continue
        times = PassTimes(plan, context)
        for stage, ops in enumerate(plan.order):
            alike = PassTimes(*equal(plan, context, stage))
            for op in ops:
                assert times.seconds(stage, op) == pytest.approx(alike.seconds(stage, op), rel=1e-9, abs=1e-15), seed


def test_bytes_of_a_stage_are_those_of_its_layers():
    for seed in SEEDS:
        plan, context = drawn(seed, unequal=True)
        for stage in range(plan.limits.num_stages):
            alike, _ = equal(plan, context, stage)
            for held, wanted in zip(levels_of_stage(plan, stage), levels_of_stage(alike, stage), strict=True):
                assert held == pytest.approx(wanted), seed


def test_stages_together_compute_what_equal_ones_do():
    """Whoever has the layers, all of them run: what ranks compute on average is what one-number prediction says."""
    for seed in SEEDS:
        plan, context = drawn(seed, unequal=True, orders=False)
        plan = plan.revised(replayed=())
        busy = simulate(plan, context, record=False).busy_s.mean(axis=0)
        flat = replace(plan.limits, layers=(), layers_per_stage=4)
        mean = predict(plan.revised(limits=flat), context.costs, context.head_frac).busy_s
        assert busy == pytest.approx(np.array(mean)), seed


def test_a_plan_of_unequal_stages_is_read_back():
    for seed in SEEDS[:10]:
        plan, _ = drawn(seed, unequal=True)
        again = read_step(step_json(plan))
        assert again.limits.layers == plan.limits.layers
        assert again.digest == plan.digest
        assert again.limits.memory.activation_bytes_per_token == pytest.approx(
            plan.limits.memory.activation_bytes_per_token
        )
