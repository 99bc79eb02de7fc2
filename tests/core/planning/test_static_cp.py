"""Static context parallelism: every micro-batch on a lane of neighbouring ranks."""

from dataclasses import replace

import pytest
from evenload.core.costs.memory import activation_budget_bytes, peaks_of_stage
from evenload.core.laws import check
from evenload.core.plan.step_plan import Op, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import RECIPES
from evenload.core.planning.static_cp import fold_cp, unfold_cp
from evenload.core.planning.stock import stock_plan
from evenload.core.recipe.recipe import load
from evenload.core.simulate.passes import PassTimes
from evenload.core.simulate.predict import predict
from evenload.core.simulate.step import simulate
from hypothesis import given
from hypothesis import strategies as st

CAP = 4096


def chain(cp, dp, *words):
    settings = [f"parallel.cp={cp}", f"parallel.dp={dp}", f"plugins.packing.max_tokens={CAP}", *words]
    recipe = load(RECIPES / "gpu-node.yaml", ["costs=verl-7b", "train.global_batch_size=64", *settings])
    return PlanChain.of_recipe(recipe, recipe.layout())


@given(st.lists(st.integers(2, 4 * CAP), min_size=8, max_size=40), st.sampled_from([1, 2, 3, 8]))
def test_every_planner_is_lawful_on_lanes(lengths, cp):
    made = chain(cp, 2)
    batch = as_lengths(lengths)
    for name in ("", *made.rivals.names):
        plan = made.baseline(name, batch) if name else made.plan(batch)
        lanes = {tuple(range(first, first + cp)) for first in range(0, 2 * cp, cp)}
        assert {m.ranks for m in plan.micro_batches} <= lanes
        assert plan.num_tokens == sum(lengths)
        assert simulate(plan, made.context, record=False).step_s > 0


def test_ranks_that_share_and_recompute_run_backward_as_forward():
    made = chain(2, 2, "train.recompute=true", "parallel.pp=2")
    plan = made.plan(as_lengths([4 * CAP, CAP, 700, 600, 500, 400, 300, 200]))
    assert plan.cut
    assert not plan.backward


def test_a_lane_holds_as_many_tokens_as_its_ranks_together():
    plan = chain(4, 2, "plugins.packing.slices=off").plan(as_lengths([4 * CAP, 4 * CAP]))
    assert {len(m.slices) for m in plan.micro_batches} == {1}
    assert plan.limits.max_tokens == CAP


def test_a_lane_holds_what_each_of_its_ranks_holds():
    made = chain(4, 2, "costs=auto")
    assert made.limits.memory.head_bytes_per_token > 0
    limits, _ = fold_cp(made.limits, made.context)
    lanes = stock_plan(as_lengths([800, 1200, 400, 1600]), limits)
    on_ranks = check(unfold_cp(lanes, made.limits, 4))
    held = [peak for peak, _ in peaks_of_stage(lanes, 0)]
    assert [peak for peak, _ in peaks_of_stage(on_ranks, 0)] == pytest.approx([peak for peak in held for _ in range(4)])


def test_a_lane_computes_as_fast_as_its_ranks_together():
    batch = as_lengths([1000] * 8)
    one, four = chain(1, 2), chain(4, 2)
    seconds = [predict(c.plan(batch), c.context.costs).step_s for c in (one, four)]
    launches = one.context.costs.launch_s
    assert seconds[1] == pytest.approx(seconds[0] / 4, abs=4 * launches)
    assert four.plan(batch).bound_s == pytest.approx(one.plan(batch).bound_s / 4, abs=launches)


@pytest.mark.parametrize("dp", [1, 2])
def test_a_lane_has_room_for_what_each_of_its_ranks_has(dp):
    made = chain(4, dp, "costs=auto", "cluster=a100", "train.dtype=bf16")
    limits, context = fold_cp(made.limits, made.context)
    memory = made.context.costs.memory
    assert 0 < memory.sharded_bytes < memory.fixed_bytes
    own = activation_budget_bytes(made.context.cluster, memory, made.limits)
    assert activation_budget_bytes(context.cluster, context.costs.memory, limits) == pytest.approx(own)


def test_a_lane_takes_as_long_as_its_ranks_with_their_all_to_all():
    made = chain(4, 1, "cluster=a100")
    context = replace(made.context, traffic=replace(made.context.traffic, cp_comm="all_to_all"))
    limits, of_lane = fold_cp(made.limits, context)
    lanes = stock_plan(as_lengths([800, 1200, 400]), limits)
    on_ranks = simulate(check(unfold_cp(lanes, made.limits, 4)), context)
    assert on_ranks.exposed_s.max() > 0
    ends = [max(s.end_s for s in found.spans if s.kind in "FBC") for found in (simulate(lanes, of_lane), on_ranks)]
    assert ends[0] == pytest.approx(ends[1])


def test_a_lane_hands_over_in_the_time_of_its_ranks():
    made = chain(4, 2, "parallel.pp=2")
    limits, of_lane = fold_cp(made.limits, made.context)
    lanes = stock_plan(as_lengths([800, 1200]), limits)
    on_ranks = unfold_cp(lanes, made.limits, 4)
    times = [PassTimes(lanes, of_lane), PassTimes(on_ranks, made.context)]
    each = [[of.hand_over(0, Op("F", i)) for i in range(2)] for of in times]
    assert each[0] == pytest.approx(each[1])
    assert each[0][1] > each[0][0] > 0


def test_the_stock_plan_runs_one_sequence_a_lane():
    made = chain(2, 2)
    plan = check(made.stock(as_lengths([10, 20, 30, 1])))
    assert [m.ranks for m in plan.micro_batches] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert [m.pad_to for m in plan.micro_batches] == [0, 0, 0, 2]


def test_a_lane_of_few_tokens_is_padded_no_further_than_it_must():
    made = chain(8, 1, "plugins.packing.max_tokens=8", "plugins.packing.slices=off")
    (one,) = made.plan(as_lengths([1] * 7)).micro_batches
    assert one.pad_to == 2, "14 tokens on 8 ranks, not 56"
    (one,) = made.plan(as_lengths([3, 1])).micro_batches
    assert one.pad_to == 4


def test_lanes_without_work_run_a_dummy_on_every_rank():
    plan = check(chain(2, 3, "train.global_batch_size=6").stock(as_lengths([10])))
    assert [m.ranks for m in plan.micro_batches] == [(0, 1), (2,), (3,), (4,), (5,)]


def test_each_rank_of_a_lane_leaves_as_much_in_host_memory():
    made = chain(2, 2)
    limits, _ = fold_cp(made.limits, made.context)
    lanes = stock_plan(as_lengths([10]), limits)
    lanes = check(replace(lanes, offload=tuple(0.5 if m.slices else 0.0 for m in lanes.micro_batches)))
    assert len(lanes.micro_batches) == 2
    assert check(unfold_cp(lanes, made.limits, 2)).offload == (0.5, 0.0, 0.0)


def test_a_pipelined_chain_keeps_its_order_on_lanes():
    made = chain(2, 1, "parallel.pp=2", "model.num_layers=16")
    plan = made.plan(as_lengths([4 * CAP, 100, 100]))
    assert plan.cut
    assert plan.order
    assert {m.ranks for m in plan.micro_batches} == {(0, 1)}


def test_slices_on_lanes_pay_for_their_prefixes():
    """Over slow links the plan without cuts wins, although by compute alone equal slices do."""
    made = chain(8, 1, "parallel.pp=4", "plugins.packing.slices=even")
    slow = made.context.cluster.intra.model_copy(update={"bytes_per_s": 1e8})
    cluster = made.context.cluster.model_copy(update={"intra": slow, "inter": slow})
    batch = as_lengths([4 * CAP] * 3 + [300] * 20)
    fast_links, slow_links = made.plan(batch), replace(made, context=replace(made.context, cluster=cluster))
    assert fast_links.cut
    assert not slow_links.plan(batch).cut
