"""Padded groups: their law, near the best of all plans in small batches, and never behind what others do with rows."""

from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest
from evenload.core.costs.context import PlanningContext, Traffic
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.errors import EvenloadError, PlanError
from evenload.core.laws import check
from evenload.core.machine.cluster import Link
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, as_lengths
from evenload.core.planning.judge import certified_s, judge
from evenload.plugins.packing import padded

from ...core.by_hand import nodes
from ..chains import packing_chain

chain = partial(packing_chain, max_tokens=2048, padded=True)


def drawn(count, seed):
    return as_lengths(np.random.default_rng(seed).lognormal(5, 1, count).clip(16, 1024).astype(int))


def least_s(rows, made):
    """Of all runs of neighbours, tried one by one."""
    count = len(rows.tokens)
    every = ([0, *cuts, count] for k in range(count) for cuts in combinations(range(1, count), k))
    fitting = (stops for stops in every if all(b - a <= rows.most[a] for a, b in pairwise(stops)))
    return min(padded.passes_s(rows.costs(stops), made.caps) for stops in fitting)


@pytest.mark.parametrize(("dp", "zero"), [(1, 1), (2, 3), (4, 3), (3, 1)])
def test_small_batches_are_planned_next_to_the_best_of_all_plans(dp, zero):
    for seed in range(3):
        made, lengths = chain(dp, zero=zero), drawn(11, seed)
        rows = padded.SortedRows.of(lengths, made.caps, made.context)
        costs = [
            rows.launch_s + len(m.slices) * float(made.context.costs.sequence_s([max(s.length for s in m.slices)])[0])
            for m in made.plan(lengths).micro_batches
            if m.slices
        ]
        best_s = least_s(rows, made)
        assert best_s <= padded.passes_s(costs, made.caps) * (1 + 1e-9)
        assert padded.passes_s(costs, made.caps) <= 1.05 * best_s
        assert padded.bound_s(lengths, made.caps, made.context) <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[100], [100, 20, 20], [10] * 40, [80, 80, 79, 78]], ids=str)
def test_the_bound_is_the_mean_of_the_least_total_or_the_longest_row_with_its_part_of_the_experts(lengths, ep):
    """Groups of rows as a shortest path by hand: launch + rows x the longest of them, under a cap of 200 tokens."""
    each = PassCost(launch_s=5.0, token_s=0.5, expert_s=1.5, pair_s=0.005)
    costs, link = Costs(source="a", forward=each, backward=each, ep=ep), Link(latency_s=0.0, bytes_per_s=1e12)
    context = PlanningContext(costs, Layout(1, 1, 1, ep, 4), nodes(link=link, flops_per_s=1e12), Traffic())
    rows = sorted(lengths, reverse=True)
    least = [0.0] * (len(rows) + 1)
    for i in reversed(range(len(rows))):
        n = rows[i]
        row_s = n * 1.0 + n * 3.0 + n * n / 2 * 0.01
        runs = range(1, 1 + min(len(rows) - i, 200 // n))
        least[i] = 10.0 + min(k * row_s + least[i + k] for k in runs)
    alone_s = 10.0 + rows[0] * (1.0 + 3.0 / ep) + rows[0] ** 2 / 2 * 0.01
    bound_s = padded.bound_s(as_lengths(lengths), Limits(4, 200, in_step=ep, padded=True), context)
    assert bound_s == pytest.approx(max(least[0] / 4, alone_s), rel=1e-12)


@pytest.mark.parametrize(("dp", "zero", "gap"), [(1, 1, 1.001), (8, 3, 1.1), (8, 1, 1.02)])
def test_a_plan_is_near_its_bound_and_ahead_of_other_rows(dp, zero, gap):
    made, lengths = chain(dp, zero=zero), drawn(256, 1)
    plan = made.plan(lengths)
    step_s = judge(plan, made.context).step_s
    assert step_s <= gap * certified_s(plan, made.context)
    for name in ("stock", "group_by_length", "token_budget", "whole", "best_fit"):
        assert step_s <= judge(made.baseline(name, lengths), made.context).step_s, name
    assert plan.num_padded_tokens == sum(m.num_padded_tokens for m in plan.micro_batches) > plan.num_tokens
    assert max(m.num_padded_tokens for m in plan.micro_batches) <= 2048


def test_rows_of_several_lengths_and_parts_of_samples_break_the_law():
    made = chain(1, zero=3)
    plan = made.plan(as_lengths([30, 20, 10]))
    several = MicroBatch(tuple(s for m in plan.micro_batches for s in m.slices), (0,))
    with pytest.raises(PlanError, match="several lengths"):
        check(plan.revised(micro_batches=(several,)))
    half = plan.micro_batches[0].slices[0]._replace(stop=5)
    rest = half._replace(start=5, stop=30)
    cut = (MicroBatch((half,), (0,)), MicroBatch((rest,), (0,)), *plan.micro_batches[1:])
    with pytest.raises(PlanError):
        check(plan.revised(micro_batches=cut))


def test_what_cannot_be_rows_is_refused_with_what_to_change():
    with pytest.raises(EvenloadError, match="group_size"):
        chain(2, zero=3, group_size=2)
    with pytest.raises(EvenloadError, match="max_tokens"):
        chain(2, zero=3, max_tokens=64).plan(as_lengths([100, 3]))
