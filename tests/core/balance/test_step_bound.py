"""The bound of a step against lawful plans of every kind: drawn, picked by hand, of planners, of baselines."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from evenload.core.balance.step_bound import passes_bound_s, stage_costs
from evenload.core.costs.context import PlanningContext, Traffic
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.machine.cluster import Link
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import certified_s
from evenload.core.recipe.recipe import parse
from evenload.core.simulate.step import after_passes_s, simulate
from harness.cases import pairs
from hypothesis import settings

from ..by_hand import nodes
from .drawn_plans import drawn

TOLERANCE = 1e-9
PLANS = min(2000, 8 * settings.default.max_examples)
"""Of each of the four ways in which layers may run again."""


@pytest.mark.slow
@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("orders", [False, True])
def test_no_drawn_plan_is_below_the_bound(recompute, orders, unequal):
    """Held to what the plan itself holds at most, so memory is always as tight as it can be."""
    near = 0
    for seed in range(PLANS // 4 if unequal else PLANS):
        plan, context = drawn(seed, recompute=recompute, orders=orders, unequal=unequal)
        found = simulate(check(plan), context, record=False)
        held = {"orders": bool(plan.recompute), "room_bytes": float(found.activation_bytes.max())}
        least_s = passes_bound_s(plan.lengths, plan.limits, context, **held)
        assert 0 < least_s <= found.passes_s * (1 + TOLERANCE), seed
        assert least_s + after_passes_s(context) <= found.step_s * (1 + TOLERANCE), seed
        near += found.passes_s < (1.05 if unequal else 1.01) * least_s
    assert near > 0


def tapered(sizes, stages):
    """Sequences of one token, so many in each micro-batch, in 1F1B; weight gradients last."""
    numbers, count = iter(range(sum(sizes))), len(sizes)
    batches = tuple(MicroBatch(tuple(Slice(next(numbers), 0, 1) for _ in range(k)), (0,)) for k in sizes)
    order = []
    for stage in range(stages):
        row = [Op("F", i) for i in range(min(count, stages - 1 - stage))]
        for k in range(count):
            row += [Op("F", k + stages - 1 - stage)] if k + stages - 1 - stage < count else []
            row.append(Op("B", k))
        order.append((*row, *(Op("W", k) for k in range(count))))
    limits = Limits(1, sum(sizes), stages, splits_backward=True)
    return check(StepPlan(as_lengths([1] * sum(sizes)), batches, limits, tuple(order)))


def of_tokens(stages, launch_s, hand_over_s):
    """A token takes a second forward, two backward, and so many between stages."""
    link = Link(latency_s=0.0, bytes_per_s=1e12)
    forward, backward = PassCost(launch_s=launch_s, token_s=1), PassCost(launch_s=launch_s, token_s=2)
    costs = Costs(source="a", forward=forward, backward=backward)
    traffic = Traffic(state_bytes_per_token=hand_over_s * link.bytes_per_s)
    return PlanningContext(costs, Layout(1, stages, 1, 1, 1), nodes(link=link, flops_per_s=1e12), traffic, 0.2)


@pytest.mark.parametrize(("stages", "hand_over_s", "above"), [(4, 1.0, 1.06), (4, 0.0, 1.11), (8, 3.0, 1.12)])
def test_few_micro_batches_wait_for_all_stages_both_ways(stages, hand_over_s, above):
    """Where launches are dear one or two are best, and the way of a large one through all stages is the step."""
    context, count = of_tokens(stages, 300.0, hand_over_s), 50
    few = [count], [count // 2, count - count // 2], [count // 4, count // 2, count - count // 4 - count // 2]
    seconds = min(simulate(tapered(sizes, stages), context, record=False).passes_s for sizes in few)
    least_s = passes_bound_s(np.ones(count), Limits(1, count, stages, splits_backward=True), context)
    assert 1 <= seconds / least_s < above


@pytest.mark.parametrize(("stages", "count"), [(3, 200), (4, 300)])
def test_growing_micro_batches_come_near_the_bound(stages, count):
    """Equal ones stay a tenth above: few of them are long, many are as many launches."""
    context = of_tokens(stages, 2.0, 0.0)
    taken = {}
    for growth, most, ends in product((1.0, 1.5, 1.8, 2.2, 3.0), (20, 40, 80), ([], [20, 10])):
        sizes, growing = [2 if growth > 1 else most], count - sum(ends)
        while sum(sizes) < growing:
            sizes.append(min(most, round(sizes[-1] * growth), growing - sum(sizes)))
        sizes += ends
        seconds = simulate(tapered(sizes, stages), context, record=False).passes_s
        taken.setdefault(growth, []).append(seconds)
    least_s = passes_bound_s(np.ones(count), Limits(1, count, stages, splits_backward=True), context)
    least = {growth: min(seconds) / least_s for growth, seconds in taken.items()}
    assert 1 <= min(least.values()) < 1.05
    assert least[1.0] > min(least.values()) + 0.02


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_of_a_sequence_alone_on_a_rank_the_others_of_its_group_have_the_experts(ep):
    """Four ranks, one sequence: 100 tokens of 1 s and 5,000 pairs of 0.01 s where it lies, and 100 x 3 s at experts."""
    link = Link(latency_s=0.0, bytes_per_s=1e12)
    each = PassCost(launch_s=5.0, token_s=0.5, expert_s=1.5, pair_s=0.005)
    costs = Costs(source="a", forward=each, backward=each, ep=ep)
    context = PlanningContext(costs, Layout(1, 1, 1, ep, 4), nodes(link=link, flops_per_s=1e12), Traffic())
    limits = Limits(4, 100, in_step=ep)
    bound_s = passes_bound_s(np.array([100]), limits, context)
    assert bound_s == pytest.approx(100 * 1.0 + 5000 * 0.01 + 100 * 3.0 / ep + 2 * 5.0, rel=1e-12)
    dummies = tuple(MicroBatch((), (rank,)) for rank in range(1, 4))
    plan = StepPlan(as_lengths([100]), (MicroBatch((Slice(0, 0, 100),), (0,)), *dummies), limits)
    assert bound_s <= simulate(check(plan), context, record=False).passes_s * (1 + TOLERANCE)


def test_sequences_that_take_less_than_their_tokens_do_are_bounded_by_that():
    """Two ranks: 100 tokens of 2 s and 5,000 pairs of 0.02 s, 60 of which are not there; 40 tokens and 800 pairs."""
    each = PassCost(token_s=1.0, pair_s=0.01)
    costs = Costs(source="a", forward=each, backward=each, beside=((-30.0, -30.0), (1.0, 1.0)))
    context = PlanningContext(costs, Layout(1, 1, 1, 1, 2), nodes(), Traffic())
    limits, lengths = Limits(2, 100), as_lengths([100, 40])
    bound_s = passes_bound_s(lengths, limits, context)
    assert bound_s == pytest.approx(100 * 2.0 + 5000 * 0.02 - 60.0, rel=1e-12)
    slices = [(Slice(number, 0, length),) for number, length in enumerate(lengths.tolist())]
    plan = StepPlan(lengths, tuple(MicroBatch(own, (rank,)) for rank, own in enumerate(slices)), limits)
    assert bound_s == pytest.approx(simulate(check(plan), context, record=False).passes_s, rel=1e-12)


SETTINGS = {
    "packing": {"packing": 512},
    "pipeline": {"pipeline": 512},
    "packing, pipeline": {"packing": 512, "pipeline": 512},
    "mesh": {"mesh": 512},
    "all": {"packing": 512, "mesh": 512, "pipeline": 512},
}
BATCHES = {
    "one long": [4000],
    "one short": [3],
    "ones": [1] * 9,
    "at the cap": [512] * 7,
    "fewer than stages": [200, 30],
    "heavy": [1800, 900, 512, 300, 200, 150, 100, 90, 80, 60, 50, 40, 30, 20, 10, 5],
}


def chain_of(plugins, *, stages, tp, recompute=False, memory_bytes=0.0):
    enabled = {name: {"enabled": True, "max_tokens": cap} for name, cap in SETTINGS[plugins].items()}
    recipe = parse(
        {
            "model": {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 256},
            "parallel": {"dp": 4, "pp": stages, "tp": tp},
            "train": {"dtype": "bf16", "recompute": recompute},
            "cluster": "h200",
            "plugins": enabled,
        }
    )
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    context, cluster = chain.context, chain.context.cluster
    # A device so slow that work counts beside launches.
    forward, backward = context.costs.forward.scaled(1e4, 0.1), context.costs.backward.scaled(1e4, 0.1)
    costs = context.costs.model_copy(update={"forward": forward, "backward": backward})
    memory = {"memory_bytes": memory_bytes} if memory_bytes else {}
    return replace(chain, context=replace(context, costs=costs, cluster=cluster.model_copy(update=memory)))


@pytest.mark.slow
@pairs(("plugins", SETTINGS), ("stages, tp", [(1, 1), (1, 2), (4, 2)]), ("recompute", [False, True]))
def test_no_plan_or_lawful_baseline_is_below_the_bound(plugins, stages, tp, recompute):
    chain = chain_of(plugins, stages=stages, tp=tp, recompute=recompute)
    for name, lengths in BATCHES.items():
        batch = as_lengths(lengths)
        try:
            plan = chain.plan(batch)
        except EvenloadError:
            continue
        least_s = certified_s(plan, chain.context)
        assert 0 < least_s <= simulate(plan, chain.context, record=False).step_s * (1 + TOLERANCE), name
        for baseline in chain.rivals.names:
            try:
                other = chain.rule(baseline, batch)
            except EvenloadError:
                continue
            assert least_s <= simulate(other, chain.context, record=False).step_s * (1 + TOLERANCE), (name, baseline)


def test_replays_that_memory_forces_are_in_the_bound():
    """Whatever is cut and replayed: a rank that holds 1,000 of 4,000 tokens runs most of them forward again."""
    roomy = chain_of("packing", stages=1, tp=1)
    limits, batch = roomy.caps, as_lengths([4000])
    memory = limits.memory
    room_bytes = 1000 * memory.activation_bytes_per_token + 4000 * memory.kv_bytes_per_token + memory.pass_bytes
    free_s = passes_bound_s(batch, limits, roomy.context)
    tight_s = passes_bound_s(batch, limits, roomy.context, room_bytes=room_bytes)
    forward = roomy.context.costs.forward
    head = roomy.context.head_frac * forward.token_s
    assert tight_s - free_s == pytest.approx(float(forward.seconds(3000.0)) - 3000 * head, rel=0.2)
    capped = replace(limits, max_activation_bytes=room_bytes)
    assert passes_bound_s(batch, capped, roomy.context, room_bytes=room_bytes) == tight_s


def test_stages_have_their_own_part_of_head_and_traffic():
    context = chain_of("pipeline", stages=4, tp=2).context
    first, middle, _, last = stage_costs(context)
    mean = context.costs.forward.token_s
    moved = middle.forward.token_s - mean * (1 - context.head_frac)
    assert moved > 0
    assert last.forward.token_s == pytest.approx(mean * (1 + 3 * context.head_frac) + moved)
    # The embedding's all-reduce.
    assert first.forward.launch_s > middle.forward.launch_s
    assert last.backward.launch_s > middle.backward.launch_s
    assert 0 == first.in_s < middle.in_s < last.in_s


def test_nothing_takes_no_time():
    chain = chain_of("pipeline", stages=4, tp=2)
    assert passes_bound_s(np.array([], dtype=np.int64), chain.caps, chain.context) == 0
