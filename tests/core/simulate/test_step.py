"""Simulated steps against schedules and transfers small enough to work out by hand."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from evenload.core.costs.context import PlanningContext, Traffic
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.errors import EvenloadError, PlanError
from evenload.core.laws import check
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.order import orders_of_stage
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.simulate.events import play
from evenload.core.simulate.predict import predict
from evenload.core.simulate.step import simulate
from hypothesis import given
from hypothesis import strategies as st

from ..by_hand import NODES_OF_4, ONE, ops, plan


def context(layout, costs=ONE, **traffic):
    return PlanningContext(costs, layout, NODES_OF_4, Traffic(**traffic))


def by_rank(result):
    rows = defaultdict(list)
    for span in result.spans:
        rows[span.stage, span.rank].append((span.kind, span.start_s, span.end_s))
    return rows


def test_ranks_work_side_by_side():
    result = simulate(plan([4, 1, 1], [(0,), (1,), (1,)], Limits(2, 10)), context(Layout(dp=2)))
    assert result.step_s == 12
    assert result.busy_s.tolist() == [[12, 6]]
    assert result.imbalance == pytest.approx(12 / 9)
    assert result.bubble_frac == pytest.approx(6 / 24)
    assert by_rank(result)[0, 1] == [("F", 0, 1), ("B", 1, 3), ("F", 3, 4), ("B", 4, 6)]


def test_a_stage_starts_when_the_state_has_arrived():
    made = plan([1, 1], [(0,), (0,)], Limits(1, 10, num_stages=2))
    result = simulate(made, context(Layout(pp=2), state_bytes_per_token=0.5))
    # Stage 1: F0 1.5..2.5, B0 ..4.5, F1 (sent at 2, there at 2.5) ..5.5, B1 ..7.5; stage 0: B0 5..7, B1 8..10.
    assert by_rank(result)[1, 0] == [("F", 1.5, 2.5), ("B", 2.5, 4.5), ("F", 4.5, 5.5), ("B", 5.5, 7.5)]
    assert by_rank(result)[0, 0] == [("F", 0, 1), ("F", 1, 2), ("B", 5, 7), ("B", 8, 10)]
    assert (result.step_s, result.exposed_frac) == (10, 0)


def test_weight_gradients_that_run_later_let_the_stage_before_begin_sooner():
    """A backward of 2 s a token is 1 s of its input's gradient and 1 s of its weights'."""
    made = plan([1], [(0,)], Limits(1, 10, num_stages=2, splits_backward=True))
    split = check(replace(made, order=(ops("F0 B0 W0"),) * 2))
    found = by_rank(simulate(split, context(Layout(pp=2))))
    assert found[1, 0] == [("F", 1, 2), ("B", 2, 3), ("W", 3, 4)]
    assert found[0, 0] == [("F", 0, 1), ("B", 3, 4), ("W", 4, 5)]
    whole, apart = (simulate(one, context(Layout(pp=2))) for one in (made, split))
    assert (whole.step_s, apart.step_s) == (6, 5)
    assert whole.busy_s.tolist() == apart.busy_s.tolist()
    # A quarter of the linear work is the output layer's, whose weight gradients stay where they are.
    last = by_rank(simulate(split, replace(context(Layout(pp=2)), head_frac=0.25)))[1, 0]
    assert [end - start for _, start, end in last] == [1.25, 1.75, 0.75]


def test_a_plan_says_itself_what_is_recomputed():
    """Two of four layers at the second stage: half of their forward, whatever the recipe recomputes."""
    made = plan([3], [(0,)], Limits(1, 10, num_stages=2, layers_per_stage=4))
    made = check(replace(made, recompute=((0,), (2,))))
    launching = Costs(source="", forward=PassCost(launch_s=1, token_s=1), backward=PassCost(launch_s=2, token_s=2))
    for costs in (launching, launching.recomputed(1.0)):
        found = simulate(made, context(Layout(pp=2), costs))
        assert [(kind, end - start) for kind, start, end in by_rank(found)[1, 0]] == [("F", 4), ("R", 1.5), ("B", 8)]
        assert [(kind, end - start) for kind, start, end in by_rank(found)[0, 0]] == [("F", 4), ("B", 8)]
        assert predict(made, costs).busy_s == (4 + 8 + 0.75,)
    # The output layer does not run again.
    headed = simulate(made, replace(context(Layout(pp=2), launching), head_frac=0.5))
    assert by_rank(headed)[1, 0][1][0] == "R"
    assert np.diff(by_rank(headed)[1, 0][1][1:]) == 0.75


def test_the_last_stage_has_the_output_layer():
    made = plan([3], [(0,)], Limits(1, 10, num_stages=3))
    result = simulate(made, replace(context(Layout(pp=3)), head_frac=0.25))
    # A mean stage takes 3 s forward; a quarter of all linear work, 2.25 of 9 s, is the last one's alone.
    assert result.busy_s.tolist() == [[2.25 * 3], [2.25 * 3], [4.5 * 3]]
    assert by_rank(result)[2, 0] == [("F", 4.5, 9.0), ("B", 9.0, 18.0)]
    assert result.step_s == 9 * 3


def test_a_host_that_waits_for_its_sends_loses_their_time():
    made = plan([1, 1], [(0,), (0,)], Limits(1, 10, num_stages=2))
    waits = simulate(made, context(Layout(pp=2), state_bytes_per_token=0.5, waits_for_sends=True))
    assert by_rank(waits)[0, 0][:2] == [("F", 0, 1), ("F", 1.5, 2.5)]
    assert waits.exposed_s.tolist() == [[1.0], [1.0]]
    assert waits.step_s > 10


def test_a_link_carries_one_tensor_at_a_time():
    made = plan([1, 1], [(0,), (0,)], Limits(1, 10, num_stages=2))
    made = check(replace(made, order=(ops("F0 F1 B0 B1"),) * 2))
    result = simulate(made, context(Layout(pp=2), state_bytes_per_token=3.0))
    # The first forward arrives at 1 + 3, the second, ready at 2, at 4 + 3.
    assert [start for kind, start, _ in by_rank(result)[1, 0] if kind == "F"] == [4, 7]


def test_stages_of_other_nodes_use_the_slower_link():
    made = plan([1] * 4, [(0,), (1,), (2,), (3,)], Limits(4, 10, num_stages=2))
    result = simulate(made, context(Layout(dp=4, pp=2), state_bytes_per_token=1.0))
    assert by_rank(result)[1, 0][0] == ("F", 3.0, 4.0)


RING = PassCost(token_s=1.0, pair_s=0.25)


@pytest.mark.parametrize(
    ("cp_comm", "forward_s", "backward_s"),
    [
        # 8 tokens on 2 ranks. Keys and values of 4 tokens, 2 bytes each, go round once; attention takes
        # 0.25 * 8 * 4 / 2 = 4 s a rank, half of it while the other half is on its way.
        ("ring", 8 - 2, 16 - 2),
        # What 4 tokens have: Q and the output 2 * 3 bytes, K and V 2; half of it leaves.
        ("all_to_all", 4 * 8 / 2, 4 * 8 / 2),
        ("all_gather", 8, 16),
    ],
)
def test_shared_sequences_pay_for_what_attention_cannot_hide(cp_comm, forward_s, backward_s):
    costs = Costs(source="test", forward=RING, backward=RING)
    made = plan([8], [(0, 1)], Limits(2, 8))
    traffic = {"query_bytes_per_token": 3.0, "kv_bytes_per_token": 2.0, "cp_comm": cp_comm}
    result = simulate(made, context(Layout(dp=2), costs, **traffic))
    compute = 8 / 2 + 0.25 * 8 * 4 / 2
    assert by_rank(result)[0, 0] == [
        ("F", 0, compute),
        ("C", compute, compute + forward_s),
        ("B", compute + forward_s, 2 * compute + forward_s),
        ("C", 2 * compute + forward_s, 2 * compute + forward_s + backward_s),
    ]
    assert result.exposed_s.tolist() == [[forward_s + backward_s] * 2]


def test_measured_rates_of_all_to_all_come_first():
    made = plan([8], [(0, 1)], Limits(2, 8))
    traffic = {"query_bytes_per_token": 3.0, "kv_bytes_per_token": 2.0, "cp_comm": "all_to_all"}
    at = context(Layout(dp=2), **traffic)
    at = replace(at, cluster=NODES_OF_4.model_copy(update={"all_to_all_bytes_per_s": {2: 16.0}}))
    assert simulate(made, at).exposed_s[0, 0] == 2 * 32 / 16


def test_tensor_parallel_ranks_reduce_hidden_states():
    made = plan([8], [(0,)], Limits(1, 8))
    result = simulate(made, context(Layout(tp=2), layers=3, state_bytes_per_token=1.0))
    # 2 all-reduces a layer and direction, one at the embedding, one at the output; each 2 * (8 / 2) bytes long.
    assert result.exposed_s.tolist() == [[2 * (2 * 3 + 1) * 8.0]]
    stages = plan([8], [(0,)], Limits(1, 8, num_stages=3))
    result = simulate(stages, context(Layout(tp=2, pp=3), layers=3, state_bytes_per_token=1.0))
    assert result.exposed_s.tolist() == [[(4 * 3 + 1) * 8.0], [4 * 3 * 8.0], [(4 * 3 + 1) * 8.0]]


def test_experts_cost_their_tokens_and_what_weights_compute_cannot_hide():
    made = plan([8, 8], [(0,), (1,)], Limits(2, 8))
    layout = Layout(dp=2, ep=2)
    tokens = simulate(made, context(layout, expert_bytes_per_token=1.0))
    assert tokens.exposed_s[0, 0] == 2 * 2 * 8 / 2
    weights = simulate(made, context(layout, expert_bytes_per_token=1.0, expert_weight_bytes=40.0))
    # 20 s of weights behind 8 s of forward and 16 s of backward.
    assert weights.exposed_s[0, 0] - tokens.exposed_s[0, 0] == 12 + 4


@pytest.mark.parametrize(
    ("traffic", "seconds"),
    [({}, 2 * 8 / 2), ({"sharding": "optimizer"}, 8 / 2 + 4 / 2), ({"overlap_gradients": True}, 2 * 8 / 2 - 4)],
)
def test_gradients_are_summed_when_the_last_rank_is_done(traffic, seconds):
    made = plan([1, 2], [(0,), (1,)], Limits(2, 8))
    costs = ONE.model_copy(update={"update_s": 1.0})
    result = simulate(made, context(Layout(dp=2), costs, gradient_bytes=8.0, weight_bytes=4.0, **traffic))
    update = 0.5 if traffic.get("sharding") else 1.0
    assert result.step_s == 6 + seconds + update
    rank = by_rank(result)[0, 0]
    assert rank[-1] == ("U", 6 + seconds, 6 + seconds + update)
    assert ("G", 6, 6 + seconds) in rank or not seconds


@pytest.mark.parametrize(
    ("ranks", "order", "hidden_s"),
    [
        ([(0,), (1,), (0,), (1,)], "", 2),
        ([(0,), (0,), (0,), (0,)], "", 0),
        ([(0,), (1,), (0,), (1,)], "F0 B0 F1 B1 F2 B2 F3 B3", 0),
        ([(0, 1), (0,), (1,), (1,)], "", 0),
    ],
)
def test_a_gradient_sum_hides_behind_the_last_backward_of_the_hosts_own_schedule(ranks, order, hidden_s):
    """Not behind a longer one before it, not where a rank has none, not in an order that the host does not know."""
    made = plan([4, 4, 1, 1], ranks, Limits(2, 8))
    shared = tuple(m._replace(cp_comm="ring") if len(m.ranks) > 1 else m for m in made.micro_batches)
    made = check(replace(made, micro_batches=shared, order=(ops(order),) if order else ()))
    late, early = (
        simulate(made, context(Layout(dp=2), gradient_bytes=80.0, overlap_gradients=overlaps)).step_s
        for overlaps in (False, True)
    )
    assert late - early == hidden_s


def test_with_sharded_parameters_every_pass_gathers_and_all_keep_step():
    limits = Limits(2, 10, all_in_step=True)
    made = plan([4, 1, 1, 4], [(0,), (1,), (0,), (1,)], limits)
    bare = simulate(made, context(Layout(dp=2)))
    assert bare.step_s == 24
    assert bare.step_s == predict(made, ONE).step_s
    traffic = {"sharding": "parameters", "weight_bytes": 2.0, "gradient_bytes": 4.0}
    result = simulate(made, context(Layout(dp=2), **traffic))
    # One byte gathered in every pass, two scattered in a backward.
    assert result.step_s == 24 + 2 * (1 + 1 + 2)
    assert result.exposed_s.tolist() == [[8, 8]]


def test_a_replay_whose_keys_nobody_reads_is_the_only_forward():
    made = check(replace(plan([2], [(0,)], Limits(1, 8)), replayed=(0,), order=(ops("F0 B0"),)))
    result = simulate(made, context(Layout()))
    assert by_rank(result)[0, 0] == [("R", 0, 2), ("B", 2, 6)]
    assert result.busy_s.tolist() == [[6]]


@st.composite
def pipelines(draw):
    dp, pp = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    ranks = [(draw(st.integers(0, dp - 1)),) for _ in lengths]
    if lengths[0] >= dp > 1 and draw(st.booleans()):
        ranks[0] = tuple(range(dp))
    return plan(lengths, ranks, Limits(dp, 100, num_stages=pp)), Layout(dp=dp, pp=pp)


@given(pipelines(), st.floats(0, 2))
def test_no_rank_does_two_things_at_once_and_nothing_is_lost(drawn, state):
    made, layout = drawn
    result = simulate(made, context(layout, state_bytes_per_token=state, gradient_bytes=3.0))
    total = 0.0
    for spans in by_rank(result).values():
        assert all(before[2] <= after[1] + 1e-9 for before, after in pairwise(spans))
        total += sum(end - start for _, start, end in spans)
    assert total == pytest.approx(float(result.busy_s.sum() + result.exposed_s.sum()))
    assert 0 <= result.bubble_frac < 1
    passes = sum(len(row) for stage in range(layout.pp) for row in orders_of_stage(made, stage))
    assert sum(span.kind in "FB" for span in result.spans) == passes
    plain = simulate(made, context(layout), record=False)
    assert plain.step_s == pytest.approx(predict(made, ONE).step_s)
    assert plain.spans == ()
    assert result.step_s >= plain.step_s


@given(pipelines())
def test_every_pass_waits_for_what_it_needs(drawn):
    made, _ = drawn
    end = {}
    start = {}
    for event in play(made, lambda stage, op: 1.0, lambda stage, op: 0.25):
        start[event.stage, event.op] = event.start_s
        end[event.stage, event.op] = event.end_s
    for (stage, op), begin in start.items():
        before = (stage - 1, op) if op.kind == "F" else (stage + 1, op)
        if before in end:
            assert begin >= end[before] + 0.25
        if op.kind == "B":
            assert begin >= end[stage, Op("F", op.micro_batch)]


def test_a_link_is_busy_with_what_ranks_share_too():
    """Rank 1 hands over its part of the shared one from 1 s to 5 s, and its own from then on."""
    made = plan([2, 1], [(0, 1), (1,)], Limits(2, 10, num_stages=2))
    begins = {}
    for found in play(made, lambda stage, op: 1.0, lambda stage, op: 4.0):
        begins[found.stage, found.op] = found.start_s
    assert begins[1, Op("F", 0)] == 5
    assert begins[1, Op("F", 1)] == 9


def test_only_the_hosts_own_schedule_waits_for_its_sends():
    """Ranks that share run it over links that never wait; static context parallelism is the host's."""
    made = plan([2, 2], [(0, 1), (0, 1)], Limits(2, 10, num_stages=2))
    ring = check(replace(made, micro_batches=tuple(m._replace(cp_comm="ring") for m in made.micro_batches)))
    traffic = {"state_bytes_per_token": 4.0, "waits_for_sends": True}
    static, shared = (simulate(one, context(Layout(dp=2, pp=2), **traffic)) for one in (made, ring))
    assert [len(by_rank(one)[0, 0]) for one in (static, shared)] == [4, 4]
    assert static.exposed_s.max() > 0 == shared.exposed_s.max()


def test_ranks_in_step_with_unlike_counts_are_refused():
    limits = Limits(2, 100, all_in_step=True)
    plan = StepPlan(as_lengths([5, 6, 7]), tuple(MicroBatch((Slice(i, 0, 5 + i),), (i % 2,)) for i in range(3)), limits)
    with pytest.raises(PlanError, match=r"unlike numbers of passes\n  found: 2 on rank 1, 4 on rank 0"):
        list(play(plan, lambda stage, op: 1.0))


def test_memory_is_what_stays_and_what_passes_hold():
    limits = Limits(2, 8, layers_per_stage=2, memory=MemoryCost(activation_bytes_per_token=2 * 3.0))
    made = plan([4, 1], [(0,), (1,)], limits)
    memory = ONE.memory.model_copy(update={"fixed_bytes": 16.0})
    result = simulate(made, context(Layout(dp=2), ONE.model_copy(update={"memory": memory})))
    assert np.diff(result.peak_bytes).tolist() == [[-2 * 3 * 3]]
    assert result.peak_bytes[0, 0] > 24


def homes_plan(limits, **more):
    """Ranks 0 and 1 share 8 tokens, rank 1 has 4 more and rank 2 another 9."""
    slices, cp_groups = (Slice(0, 0, 8), Slice(1, 0, 4), Slice(2, 0, 9)), ((0, 1), (1,), (2,))
    m = MicroBatch(slices, (0, 1, 2), cp_comm="ring", cp_groups=cp_groups, **more)
    return check(StepPlan(as_lengths([8, 4, 9]), (m,), limits))


def test_the_slowest_rank_of_a_micro_batch_with_homes_decides():
    costs = Costs(source="test", forward=RING, backward=RING)
    result = simulate(homes_plan(Limits(3, 12)), context(Layout(dp=3), costs, kv_bytes_per_token=2.0))
    # Rank 0: 4 tokens, 0.25 * 32 / 2 s of attention; rank 1: 4 tokens and 2 s more; rank 2: 9 tokens, 10.125 s.
    own = [4 + 4, 8 + 4 + 2, 9 + 10.125]
    assert result.busy_s.tolist() == [[2 * s for s in own]]
    # A hop of 4 tokens' K and V takes 8 s: behind a block of 2 s, on rank 1 also behind its 4 tokens; backward the
    # gradients follow behind the other block and go CP group.
    forward, backward = [8 - 2, 8 - 4, 0], [(8 - 2) + (8 - 2) + 8, (8 - 4) + (8 - 2) + 8, 0]
    assert result.exposed_s.tolist() == [[f + b for f, b in zip(forward, backward, strict=True)]]
    longest = max(14 + 4, 19.125), max(14 + 18, 8 + 20)
    assert result.step_s == sum(longest)
    assert by_rank(result)[0, 0] == [("F", 0, 8), ("C", 8, 14), ("B", 19.125, 27.125), ("C", 27.125, 47.125)]
    assert by_rank(result)[0, 2] == [("F", 0, 19.125), ("B", 19.125, 38.25)]
    assert result.bubble_frac > 0


def test_homes_are_played_at_every_stage_with_replays_and_hand_overs():
    costs = Costs(source="test", forward=RING, backward=RING)
    made = homes_plan(Limits(3, 12))
    made = check(replace(made, limits=Limits(3, 12, num_stages=2), order=(ops("F0 B0"),) * 2, replayed=(0,)))
    at = replace(context(Layout(dp=3, pp=2), costs, state_bytes_per_token=1.0), head_frac=0.5)
    result = simulate(made, at)
    # Linear work: half of a mean stage's on the first, one and a half on the last, where the replay alone runs forward.
    linear, attention, tokens = [0.5, 1.5], [4, 6, 10.125], [4, 8, 9]
    expected = [
        [k * (s * n + a) for n, a in zip(tokens, attention, strict=True)] for s, k in zip(linear, (3, 2), strict=True)
    ]
    assert result.busy_s.tolist() == expected
    # Ranks 1 and 2 send to another node, the latter more.
    assert by_rank(result)[1, 2][0][1] == 4.5 + 10.125 + 9 / 0.5
    assert [kind for kind, *_ in by_rank(result)[1, 2]] == ["R", "B"]


def test_moved_tokens_even_all_modules_but_attention():
    costs = Costs(source="test", forward=RING, backward=RING)
    result = simulate(homes_plan(Limits(3, 12), remap=True), context(Layout(dp=3), costs))
    assert result.busy_s.tolist() == [[2 * (7 + 4), 2 * (7 + 6), 2 * (7 + 10.125)]]


def test_with_sharded_parameters_homes_keep_step():
    traffic = {"sharding": "parameters", "weight_bytes": 3.0, "gradient_bytes": 6.0}
    bare = homes_plan(Limits(3, 12, all_in_step=True))
    costs = Costs(source="test", forward=RING, backward=RING)
    result = simulate(bare, context(Layout(dp=3), costs, **traffic))
    assert result.step_s == 2 * 19.125 + 2 + 2 + 4
    assert result.exposed_s.tolist() == [[8, 8, 8]]


def test_activations_travel_to_the_host_while_other_layers_compute():
    limits = Limits(1, 10, layers_per_stage=6, memory=MemoryCost(activation_bytes_per_token=6 * 4.0))
    made = check(replace(plan([10], [(0,)], limits), offload=(0.5,)))
    at = context(Layout())
    # Half of 4 layers' 40 bytes: 80 bytes at 4 a second, behind 4 of 6 layers of 10 s forward and 20 s backward.
    rate = {"host_bytes_per_s": 4.0}
    result = simulate(made, replace(at, cluster=NODES_OF_4.model_copy(update=rate)))
    assert result.exposed_s[0, 0] == pytest.approx((20 - 10 * 4 / 6) + (20 - 20 * 4 / 6))
    hidden = simulate(made, replace(at, cluster=NODES_OF_4.model_copy(update={"host_bytes_per_s": 40.0})))
    assert hidden.exposed_s[0, 0] == 0
    # 240 bytes forward, 80 of them away, and half a layer on its way.
    assert hidden.peak_bytes[0, 0] == 240 - 80 + 20
    assert simulate(replace(made, offload=()), at).peak_bytes[0, 0] == 240
    with pytest.raises(EvenloadError, match="host_bytes_per_s"):
        simulate(made, at)


def test_ranks_of_homes_offload_what_they_have():
    limits = Limits(3, 12, layers_per_stage=4, memory=MemoryCost(activation_bytes_per_token=4 * 2.0))
    made = check(replace(homes_plan(limits), offload=(1.0,)))
    costs = Costs(source="test", forward=PassCost(token_s=1.0), backward=PassCost(token_s=1.0))
    at = context(Layout(dp=3), costs)
    result = simulate(made, replace(at, cluster=NODES_OF_4.model_copy(update={"host_bytes_per_s": 1.0})))
    # Two of four layers, 2 bytes a token each, behind half of the compute.
    assert result.exposed_s.tolist() == [[2 * (4 * n - n / 2) for n in (4, 8, 9)]]
