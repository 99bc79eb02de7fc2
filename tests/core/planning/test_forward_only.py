"""Planners of forwards alone: lawful plans whose backward costs nothing, no slower forward than a training plan is."""

import math

import numpy as np
import pytest
from evenload.core.costs.memory import peaks_of_stage
from evenload.core.laws import check
from evenload.core.plan.forwards import lower_forwards
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.forward_only import computing, forward_only, on_single_ranks
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


def test_attention_costs_the_share_that_it_computes_and_ranks_stay_even():
    """Sixteen long samples, a quarter of them dense: by their shares ranks are even, by dense prices they are not."""
    recipe = load("recipes/mesh.yaml", ["model.vocab_size=256", "parallel.dp=4", "data.max_length=32768"])
    recipe = recipe.changed({"plugins.packing.enabled": True, "plugins.packing.max_tokens": 32768})
    chain = forward_only(PlanChain.of_recipe(recipe, recipe.layout()))
    alone, batch = on_single_ranks(chain), as_lengths([32768] * 16)
    assert chain.shares
    assert not alone.shares
    shares = np.where(np.arange(16) % 4, 0.2, 1.0)
    priced = computing(alone, batch, shares)
    costs, dense = priced.context.costs, alone.context.costs.forward
    assert np.allclose(costs.sequence_s(batch), dense.linear_s * 32768 + shares * dense.pair_s * 32768**2 / 2)
    assert computing(alone, batch, None) is alone
    by_share, by_length = (outcome_of(own.plan(batch), priced.context).busy_s.sum(0) for own in (priced, alone))
    assert by_share.max() / by_share.mean() <= 1.05 < by_length.max() / by_length.mean()


def test_a_planner_that_lets_ranks_share_sequences_and_plans_alone_puts_each_on_a_rank_evenly():
    alone = on_single_ranks(forward_only(chain_of("mesh")))
    for batch in batches():
        plan = alone.plan(batch)
        busy = outcome_of(plan, alone.context).busy_s.sum(0)
        assert {len(one.ranks) for one in plan.micro_batches} == {1}
        assert busy.max() / busy.mean() <= 1.05


def test_where_sequences_may_be_cut_each_costs_the_mean_share():
    chain, batch = forward_only(chain_of("quickstart")), as_lengths([100_000, 2_000])
    priced = computing(chain, batch, np.array([0.25, 1.0]))
    share = (0.25 * 50**2 + 1) / (50**2 + 1)
    assert not priced.context.costs.beside
    assert priced.context.costs.forward.pair_s == pytest.approx(share * chain.context.costs.forward.pair_s)
