"""Planners of forwards alone: lawful plans whose backward costs nothing, no slower forward than a training plan is."""

import math

import numpy as np
import pytest
from evenload.core.costs.memory import peaks_of_stage
from evenload.core.laws import check
from evenload.core.plan.forwards import lower_forwards
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.forward_only import forward_only
from evenload.core.planning.judge import judge, outcome_of
from evenload.core.recipe.recipe import load

CASES = {
    "quickstart": ["parallel.dp=4"],
    "mesh": ["parallel.dp=4"],
    "pipeline": ["parallel.dp=2", "train.recompute=true"],
    "moe": ["parallel.dp=4"],
}


def chain_of(name):
    recipe = load(f"recipes/{name}.yaml", ["model.vocab_size=256", *CASES[name]])
    return PlanChain.of_recipe(recipe, recipe.layout())


def batches():
    draw = np.random.default_rng(1)
    return [as_lengths(np.minimum(draw.lognormal(6, 1.3, 40).astype(np.int64) + 2, 4096)) for _ in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_a_forward_is_balanced_at_least_as_well_as_by_a_training_plan(name):
    chain = chain_of(name)
    scoring = forward_only(chain)
    for batch in batches():
        plan = scoring.plan(batch)
        check(plan)
        seconds = outcome_of(plan, scoring.context)
        assert not plan.replayed
        assert seconds.update_s == 0.0
        assert all(op.kind != "W" for ops in plan.order for op in ops)
        trained = chain.plan(batch)
        if not (trained.replayed or trained.recompute or trained.backward):
            assert seconds.step_s <= 1.01 * judge(trained.revised(limits=plan.limits), scoring.context).step_s
        forwards_s = np.zeros_like(seconds.busy_s)
        for micro_batch in plan.micro_batches:
            for rank in micro_batch.ranks:
                forwards_s[:, rank] += scoring.context.costs.micro_batch_s(micro_batch)[0]
        if name == "quickstart":  # one stage, every rank with all experts and sequences of its own
            assert np.allclose(seconds.busy_s, forwards_s)


@pytest.mark.parametrize("name", CASES)
def test_every_forward_runs_once_and_nothing_stays(name):
    scoring = forward_only(chain_of(name))
    plan = scoring.plan(batches()[0])
    for stage in range(plan.limits.num_stages):
        for rank in range(plan.limits.num_ranks):
            scores = [a.op.micro_batch for a in lower_forwards(plan, stage, rank) if a.kind == "score"]
            assert sorted(scores) == sorted(plan.of_rank(rank))
    peaks = [peak for stage in range(plan.limits.num_stages) for peak, _ in peaks_of_stage(plan, stage)]
    assert math.isfinite(sum(peaks))
    kept = chain_of(name).plan(batches()[0])
    assert max(peaks) < max(peak for s in range(kept.limits.num_stages) for peak, _ in peaks_of_stage(kept, s))
