"""What ranks that share experts bring to them, and what that costs, against plans small enough to work out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from evenload.core.balance.bound import lower_bound_s
from evenload.core.costs.context import PlanningContext, Traffic
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.costs.memory import levels_of_stage
from evenload.core.costs.rounds import Brought, rounds_of
from evenload.core.laws import check
from evenload.core.machine.cluster import Link
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.rounds import in_rounds
from evenload.core.plan.step_plan import Op, StepPlan, as_lengths
from evenload.core.simulate.events import play
from evenload.core.simulate.passes import PassTimes
from evenload.core.simulate.predict import predict
from evenload.core.simulate.step import simulate
from hypothesis import given
from hypothesis import strategies as st

from ..by_hand import alone, nodes

COSTS = Costs(
    source="by hand", forward=PassCost(token_s=1.0, expert_s=1.0), backward=PassCost(token_s=2.0, expert_s=2.0), ep=2
)
LINK = Link(latency_s=0.5, bytes_per_s=2.0)
SUM_S = 2 * 0.5
"""Of the gradients of 2 ranks, if these have no bytes."""


def plan_of(*ranks, stages=1, in_step=2, layers=1):
    """A micro-batch for each length, on the rank in whose list it stands, in rounds."""
    lengths = [n for row in ranks for n in row]
    owners = [rank for rank, row in enumerate(ranks) for _ in row]
    limits = Limits(len(ranks), max(lengths), num_stages=stages, in_step=in_step, layers_per_stage=layers)
    return check(in_rounds(StepPlan(as_lengths(lengths), alone(lengths, owners), limits)))


def context(plan, costs=COSTS, **traffic):
    layout = Layout(pp=plan.limits.num_stages, ep=costs.ep, dp=plan.limits.num_ranks)
    return PlanningContext(costs, layout, nodes(4, LINK), Traffic(**traffic))


def test_a_round_brings_the_tokens_of_its_ranks_and_of_dummies():
    plan = plan_of([8, 2], [4], [5], [3])
    rounds = rounds_of(plan, 0, 2)
    assert {op.micro_batch: rounds[op] for op in rounds if op.kind == "B"} == {
        0: Brought(6.0, 8),
        2: Brought(6.0, 8),
        1: Brought(1.5, 2),
        5: Brought(1.5, 2),
        3: Brought(4.0, 5),
        4: Brought(4.0, 5),
    }


def test_a_round_waits_for_its_longest_pack_and_shares_the_tokens_at_experts():
    plan = plan_of([8], [4])
    result = simulate(plan, context(plan))
    # Beside experts 8 and 16 s of the longer pack; at experts 6 tokens a rank.
    assert result.step_s == 8 + 6 + 16 + 12 + SUM_S
    assert result.busy_s.tolist() == [[42, 4 + 6 + 8 + 12]]
    assert predict(plan, COSTS).step_s == result.step_s - SUM_S
    assert predict(plan, COSTS).busy_s == (42, 30)
    uneven = COSTS.model_copy(update={"expert_imbalance": 1.5})
    assert simulate(plan, context(plan, uneven)).step_s == 8 + 9 + 16 + 18 + SUM_S


def test_tokens_go_out_and_back_in_every_layer_by_the_rank_that_sends_most():
    plan = plan_of([8], [4])
    result = simulate(plan, context(plan, expert_bytes_per_token=3.0, moe_layers=2))
    # 8 tokens of 3 bytes, half of them to the other rank; out and back, forward and backward.
    assert result.exposed_s.tolist() == [[4 * (2 * 0.5 + 12 / 2) + SUM_S] * 2]
    assert result.step_s == 42 + 28 + SUM_S
    busiest = COSTS.model_copy(update={"expert_imbalance": 2.0})
    received = simulate(plan, context(plan, busiest, expert_bytes_per_token=3.0, moe_layers=2))
    assert received.exposed_s[0, 1] == 4 * (2 * 0.5 + 18 / 2) + SUM_S


@pytest.mark.parametrize(
    ("sharding", "calls", "sent_bytes"),
    [("none", 2, 2.0 * 10), ("optimizer", 2, 2.0 * 10), ("parameters", 3, 3.0 * 10)],
)
def test_gradients_of_experts_are_summed_over_ranks_that_have_the_same(sharding, calls, sent_bytes):
    plan = plan_of([1], [1], [1], [1])
    sums = {"gradient_bytes": 10.0, "weight_bytes": 10.0, "expert_frac": 0.4, "sharding": sharding}
    exposed = simulate(plan, context(plan, **sums)).exposed_s
    # Of each ten bytes 6 go around 4 ranks, a fourth of them at a time, and 4 around 2.
    around = sent_bytes * (0.6 * 3 / 4 + 0.4 * 1 / 2) / LINK.bytes_per_s
    assert exposed[0, 0] == pytest.approx(calls * (3 + 1) * LINK.latency_s + around)


lengths = st.lists(st.integers(1, 20), min_size=1, max_size=4)
prices = st.sampled_from([0.0, 0.25, 1.0])
passes = st.builds(PassCost, launch_s=prices, token_s=st.just(1.0), expert_s=prices, pair_s=prices)


@st.composite
def cases(draw):
    """Plans of 2 or 4 ranks and 1 or 2 stages: replays, layers that are recomputed, the recipe's recomputation."""
    ranks, stages = draw(st.sampled_from([2, 4])), draw(st.sampled_from([1, 2]))
    plan = plan_of(*(draw(lengths) for _ in range(ranks)), stages=stages, layers=2)
    costs = Costs(source="drawn", forward=draw(passes), backward=draw(passes), ep=2)
    if draw(st.booleans()):
        costs = costs.recomputed(1.0)
    count = len(plan.micro_batches)
    if draw(st.booleans()):
        order = _forwards_first(plan)
        recompute = tuple(tuple(draw(st.integers(0, 2)) for _ in range(count)) for _ in range(stages))
        replayed = tuple(j for j, m in enumerate(plan.micro_batches) if m.slices and draw(st.booleans()))
        plan = check(in_rounds(replace(plan, order=order, recompute=recompute, replayed=replayed)))
    return plan, costs


def _forwards_first(plan):
    ops = tuple(Op(kind, i) for kind in ("F", "B") for i in range(len(plan.micro_batches)))
    return (ops,) * plan.limits.num_stages


@given(cases())
def test_parts_of_a_pass_are_all_of_it(case):
    plan, costs = case
    at = context(plan, costs, expert_bytes_per_token=1.0, moe_layers=1)
    times = PassTimes(plan, at)
    for event in play(plan, times.seconds, times.hand_over):
        for rank in event.ranks:
            parts = times.parts(event.stage, event.op, rank)
            assert sum(s for _, s in parts) == pytest.approx(times.seconds(event.stage, event.op))
    result = simulate(plan, at)
    assert result.busy_s == pytest.approx(times.busy_s())


@given(cases(), st.floats(0.0, 1.0))
def test_a_rank_with_all_experts_computes_like_a_dense_model_of_the_same_work(case, share):
    plan, costs = case
    dense, alone = _linear(costs, 0.0), _linear(costs, share)
    results = [simulate(plan, context(plan, c)) for c in (dense, alone)]
    assert results[0].step_s == pytest.approx(results[1].step_s)
    assert results[0].busy_s == pytest.approx(results[1].busy_s)
    assert predict(plan, dense).step_s == pytest.approx(predict(plan, alone).step_s)


def _linear(costs, share):
    """The same linear work, this share of it at experts, of which each rank has all."""
    parts = {
        name: (cost := getattr(costs, name)).model_copy(
            update={"token_s": cost.linear_s * (1 - share), "expert_s": cost.linear_s * share}
        )
        for name in ("forward", "backward")
    }
    return costs.model_copy(update={**parts, "ep": 1})


@given(cases())
def test_sharing_experts_moves_seconds_between_ranks_and_loses_none(case):
    plan, costs = case
    shared, own = (PassTimes(plan, context(plan, c)).busy_s() for c in (costs, costs.model_copy(update={"ep": 1})))
    groups = np.s_[:, ::2], np.s_[:, 1::2]
    assert sum(shared[g] for g in groups) == pytest.approx(sum(own[g] for g in groups))
    # Dense work and half of the own tokens are there in any case.
    least = PassTimes(plan, context(plan, costs.at_experts(0.5).model_copy(update={"ep": 1}))).busy_s()
    assert (shared >= least * (1 - 1e-9)).all()
    hotter = PassTimes(plan, context(plan, costs.model_copy(update={"expert_imbalance": 1.25}))).busy_s()
    assert (hotter >= shared).all()


@given(cases())
def test_where_ranks_bring_equally_many_tokens_sharing_changes_nothing(case):
    _, costs = case
    plan = plan_of([5, 3, 9], [5, 3, 9])
    shared, own = (simulate(plan, context(plan, c)).step_s for c in (costs, costs.model_copy(update={"ep": 1})))
    assert shared == pytest.approx(own)


@given(st.lists(lengths, min_size=4, max_size=4), passes, passes, st.booleans())
def test_no_rank_is_busier_than_bound(ranks, forward, backward, again):
    plan = plan_of(*ranks)
    costs = Costs(source="drawn", forward=forward, backward=backward, ep=2)
    costs = costs.recomputed(1.0) if again else costs
    bound_s = lower_bound_s(plan.lengths, plan.limits, costs)
    assert bound_s <= simulate(plan, context(plan, costs)).busy_s.max() * (1 + 1e-9)


def test_a_rank_holds_what_lies_at_its_experts():
    plan = plan_of([8], [4], layers=2)
    memory = MemoryCost(activation_bytes_per_token=10.0, expert_bytes_per_token=4.0)
    held = replace(plan, limits=replace(plan.limits, memory=memory))
    # 6 bytes of own tokens, 4 of each of the 6 tokens that the round has for a rank; a layer is gone in its backward.
    assert [levels[0] for levels in levels_of_stage(held, 0)] == [8 * 6 + 6 * 4, 4 * 6 + 6 * 4]
    alone = replace(plan, limits=replace(plan.limits, memory=memory, in_step=1))
    assert [levels[0] for levels in levels_of_stage(alone, 0)] == [80, 40]
