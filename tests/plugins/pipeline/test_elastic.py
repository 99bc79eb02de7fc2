"""The elastic order of pipelines: lawful for any chunking, as drawn by hand, bubbles smaller than chain by chain."""

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from evenload.core.balance.slicing import evenly
from evenload.core.costs.context import PlanningContext, Traffic
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.costs.memory import peaks_of_stage
from evenload.core.laws import check
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.order import in_slots, one_forward_one_backward, orders_of_stage
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.simulate.step import simulate
from evenload.plugins.pipeline.clock import clock_of, end_of
from evenload.plugins.pipeline.elastic import lines_of_rounds, ordered
from evenload.plugins.pipeline.weights import SLACK, Placing
from hypothesis import given
from hypothesis import strategies as st

from ..chains import device

PLAIN = device(bytes_per_s=1.0, memory_bytes=1e9)
ONE = Costs(
    source="one second forward, two backward, per token", forward=PassCost(token_s=1.0), backward=PassCost(token_s=2.0)
)
LIMITS = Limits(
    1,
    1000,
    num_stages=2,
    layers_per_stage=2,
    splits_backward=True,
    memory=MemoryCost(activation_bytes_per_token=2 * 1.0, input_bytes_per_token=0.1, deferred_bytes_per_token=2 * 0.4),
)


def context(stages, costs=ONE, *, head_frac=0.0, ranks=1, **traffic):
    return PlanningContext(costs, Layout(pp=stages, dp=ranks), PLAIN, Traffic(**traffic), head_frac)


def lines_of(plan, rank):
    """Of a plane rank by itself, by the numbers of its micro-batches."""
    forward = list(plan.of_rank(rank))
    lines = lines_of_rounds(plan, [(number,) for number in forward])
    return lines._replace(forward=forward, backward=[forward[place] for place in lines.backward])


def chain(*chunks, stages=2):
    """One rank: sequences of so many chunks, a token each, every chunk a micro-batch, one sequence after the other."""
    slices = [Slice(i, k, k + 1) for i, count in enumerate(chunks) for k in range(count)]
    batches = tuple(MicroBatch((s,), (0,)) for s in slices)
    return StepPlan(as_lengths(chunks), batches, replace(LIMITS, num_stages=stages))


def words(plan):
    """The order of every stage, for reading: ``F0 F1 B1 B0``."""
    return [" ".join(f"{op.kind}{op.micro_batch}" for op in ops) for ops in plan.order]


def without_weights(plan):
    return [[op for op in ops if op.kind != "W"] for ops in plan.order]


def split_where_faster(plan, at, extra=0, times=1.0):
    """With so many times the memory that the order needs anyway."""
    made = ordered(plan, at, extra=extra)
    return Placing(made, at, times * peak_bytes(made), made.limits.splits_backward).placed()


def in_flight(ops):
    return max(accumulate({"F": 1, "B": -1, "W": 0}[op.kind] for op in ops))


def peak_bytes(plan):
    return float(max(peak for stage in range(plan.limits.num_stages) for peak, _ in peaks_of_stage(plan, stage)))


@st.composite
def chunked(draw):
    """Micro-batches of slices of any sequences, on some ranks and stages, and what their passes cost."""
    ranks, stages, places = draw(st.integers(1, 3)), draw(st.integers(1, 8)), draw(st.integers(1, 10))
    packs = {}
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=10))
    for index, length in enumerate(lengths):
        most = min(length, places)
        cuts = sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=most - 1))) if length > 1 else []
        bounds = [0, *cuts, length]
        count, rank = len(bounds) - 1, draw(st.integers(0, ranks - 1))
        where = sorted(draw(st.sets(st.integers(0, places - 1), min_size=count, max_size=count)))
        for place, start, stop in zip(where, bounds[:-1], bounds[1:], strict=True):
            packs.setdefault((place, rank), []).append(Slice(index, start, stop))
    batches = tuple(MicroBatch(tuple(packs[key]), (key[1],)) for key in sorted(packs))
    layers = draw(st.integers(1, 4))
    limits = replace(
        LIMITS,
        num_ranks=ranks,
        num_stages=stages,
        layers_per_stage=layers,
        memory=MemoryCost(
            activation_bytes_per_token=layers * 1.0,
            input_bytes_per_token=0.1,
            kv_bytes_per_token=layers * draw(st.sampled_from([0.0, 0.2])),
            kv_grad_bytes_per_token=layers * draw(st.sampled_from([0.0, 0.4])),
            deferred_bytes_per_token=layers * draw(st.sampled_from([0.0, 0.3, 0.9, 5.0])),
        ),
    )
    again = st.lists(st.integers(0, layers), min_size=len(batches), max_size=len(batches)).map(tuple)
    recompute = tuple(draw(again) for _ in range(stages)) if draw(st.booleans()) else ()
    seconds = st.sampled_from([0.0, 0.01, 0.3])
    cost = st.builds(PassCost, launch_s=seconds, token_s=st.sampled_from([0.1, 1.0, 2.0]), pair_s=seconds)
    memory = MemoryCost(activation_bytes_per_token=1.0)
    costs = Costs(source="drawn", forward=draw(cost), backward=draw(cost), memory=memory, num_layers=layers)
    state_bytes = draw(st.sampled_from([0.0, 0.2, 3.0]))
    head_frac = draw(st.sampled_from([0.0, 0.3]))
    plan = StepPlan(as_lengths(lengths), batches, limits, recompute=recompute)
    return plan, context(stages, costs, head_frac=head_frac, ranks=ranks, state_bytes_per_token=state_bytes)


@given(chunked(), st.integers(0, 3), st.sampled_from([float("inf"), 0.0, 20.0]))
def test_every_order_is_lawful_and_runs_ahead_as_far_as_it_may(case, extra, cap_bytes):
    plan, at = case
    made = check(ordered(plan, at, extra=extra, cap_bytes=cap_bytes))
    assert made.micro_batches == plan.micro_batches
    assert made.order == ordered(plan, at, extra=extra, cap_bytes=cap_bytes).order
    last = plan.limits.num_stages - 1
    for rank in range(plan.limits.num_ranks):
        need = lines_of(plan, rank).need
        least = max((n - j for j, n in enumerate(need)), default=0)  # what the longest chain alone demands
        for stage in range(last + 1) if need else ():
            assert in_flight(orders_of_stage(made, stage)[rank]) <= least + (1 + extra) * (last - stage)


@given(chunked(), st.integers(0, 2))
def test_weight_passes_never_lengthen_a_step_nor_need_memory(case, extra):
    plan, at = case
    whole = ordered(plan, at, extra=extra)
    split = check(split_where_faster(plan, at, extra=extra))
    assert without_weights(split) == [list(ops) for ops in whole.order]
    assert simulate(split, at, record=False).step_s <= simulate(whole, at, record=False).step_s * (1 + 1e-9)
    assert peak_bytes(split) <= peak_bytes(whole)
    # With a cap of just what it held before it is lawful still.
    capped = replace(split.limits, max_activation_bytes=peak_bytes(whole))
    check(replace(split, limits=capped))


@given(chunked(), st.integers(0, 4), st.floats(1.0, 8.0))
def test_more_memory_lets_more_weight_passes_wait_and_is_never_exceeded(case, extra, times):
    plan, at = case
    whole, tight = ordered(plan, at, extra=extra), split_where_faster(plan, at, extra=extra)
    wide = split_where_faster(plan, at, extra=extra, times=times)
    assert without_weights(wide) == [list(ops) for ops in whole.order]
    check(replace(wide, limits=replace(wide.limits, max_activation_bytes=times * peak_bytes(whole))))
    wide_s, tight_s, whole_s = (simulate(one, at, record=False).step_s for one in (wide, tight, whole))
    assert wide_s <= whole_s * (1 + 1e-9)
    assert wide_s <= tight_s * (1 + SLACK)


@given(chunked(), st.integers(0, 4))
def test_an_order_in_slots_is_lawful_and_no_faster_than_the_better_of_both(case, extra):
    plan, at = case
    slots = check(ordered(plan, at, extra=extra, played=False))
    best = ordered(plan, at, extra=extra)
    assert simulate(best, at, record=False).step_s <= simulate(slots, at, record=False).step_s * (1 + 1e-9)


@given(chunked(), st.booleans())
def test_the_clock_is_the_simulator(case, split):
    plan, at = case
    made = ordered(plan, at, extra=1)
    made = split_where_faster(plan, at, extra=1, times=4.0) if split else made
    clock = clock_of(plan, at)
    stages = range(plan.limits.num_stages)
    ends = [
        end_of([orders_of_stage(made, stage)[rank] for stage in stages], clock) for rank in range(plan.limits.num_ranks)
    ]
    assert max(ends) == pytest.approx(simulate(made, at, record=False).step_s, rel=1e-9)


def test_a_link_carries_one_chunk_at_a_time():
    batches = (MicroBatch((Slice(0, 0, 4),), (0,)), MicroBatch((Slice(0, 4, 6),), (0,)))
    at = context(2, state_bytes_per_token=3.0)
    made = check(ordered(StepPlan(as_lengths([6]), batches, LIMITS), at))
    # The last stage has F0 at 4 + 12, F1 at 16 + 6; B1 ends at 28, B0 at 36, and is there at 36 + 12.
    assert end_of(made.order, clock_of(made, at)) == simulate(made, at).step_s == 56


def test_whole_sequences_run_one_forward_one_backward():
    made = check(ordered(chain(1, 1, 1, 1, 1, stages=3), context(3)))
    assert [list(ops) for ops in made.order] == [one_forward_one_backward(range(5), ahead) for ahead in (2, 1, 0)]


@pytest.mark.parametrize(
    ("chunks", "wanted"),
    [
        # A stage alternates between the next sequence and the finished one.
        ((3, 3), ["F0 F1 F2 F3 B2 F4 B1 F5 B0 B5 B4 B3", "F0 F1 F2 B2 F3 B1 F4 B0 F5 B5 B4 B3"]),
        # Ever fewer are in flight where sequences get shorter.
        ((3, 1, 1), ["F0 F1 F2 B2 B1 F3 B0 F4 B3 B4", "F0 F1 F2 B2 B1 B0 F3 B3 F4 B4"]),
        # One stage finishes a sequence before the next.
        ((2, 1, 3), ["F0 F1 B1 B0 F2 B2 F3 F4 F5 B5 B4 B3"]),
    ],
)
def test_orders_are_those_drawn_by_hand(chunks, wanted):
    stages = len(wanted)
    made = check(ordered(chain(*chunks, stages=stages), context(stages), extra=2 * (stages == 1)))
    assert words(made) == wanted


def test_extra_forwards_run_ahead_for_each_stage_behind():
    made = check(ordered(chain(1, 1, 1, 1, 1, 1, 1, 1, stages=3), context(3), extra=1))
    assert [in_flight(ops) for ops in made.order] == [5, 3, 1]


def test_backwards_run_by_the_forwards_they_need():
    # Sequences 0 and 1 are in turns, 2 begins in the pack in which 3 ends: its chain reaches over both.
    slices = [[(0, 0, 1)], [(1, 0, 1)], [(0, 1, 2)], [(1, 1, 2)], [(3, 0, 1)], [(3, 1, 2), (2, 0, 1)], [(2, 1, 2)]]
    batches = tuple(MicroBatch(tuple(Slice(*s) for s in pack), (0,)) for pack in slices)
    plan = StepPlan(as_lengths([2, 2, 2, 2]), batches, LIMITS)
    lines = lines_of(plan, 0)
    assert lines.backward == [2, 0, 3, 1, 6, 5, 4]
    assert lines.need == [3, 3, 4, 4, 7, 7, 7]
    assert lines.owed == [3, 4, 5, 6, 7, 7, 7]
    check(ordered(plan, context(2)))


def test_without_any_memory_a_stage_runs_what_its_next_backward_needs_and_no_more():
    plan = chain(3, 2, 3, 1, stages=3)
    lines = lines_of(plan, 0)
    made = check(ordered(plan, context(3), extra=1, cap_bytes=0.0))
    assert [list(ops) for ops in made.order] == [in_slots(lines.forward, lines.backward, lines.need, 0)] * 3


def test_a_memory_cap_is_kept_where_the_longest_sequence_lets_it():
    plan = chain(4, 4, 4, 4, stages=3)
    at, chunk_bytes = context(3), 2.0
    free = ordered(plan, at, extra=2)
    assert in_flight(free.order[0]) == 10
    capped = check(ordered(plan, at, extra=2, cap_bytes=6 * chunk_bytes))
    assert [in_flight(ops) for ops in capped.order] == [6, 6, 4]
    assert simulate(capped, at).step_s < simulate(ordered(plan, at, extra=2, cap_bytes=0.0), at).step_s


def test_weight_gradients_fill_the_drain():
    plan = chain(1, 1)
    assert simulate(ordered(plan, context(2)), context(2)).step_s == 9
    made = check(split_where_faster(plan, context(2)))
    # The last stage: F0 1..2, B0 ..3, F1 ..4, B1 ..5, W0 W1 ..7; the first: B0 3..5, B1 ..7.
    assert words(made) == ["F0 F1 B0 B1", "F0 B0 F1 B1 W0 W1"]
    assert simulate(made, context(2)).step_s == 7


def test_a_rank_that_is_done_early_anyway_splits_nothing():
    batches = tuple(MicroBatch((Slice(i, 0, 1),), (int(i == 4),)) for i in range(5))
    plan = StepPlan(as_lengths([1] * 5), batches, replace(LIMITS, num_ranks=2))
    made = check(split_where_faster(plan, context(2, ranks=2)))
    assert made.split[1]
    assert all(4 not in split for split in made.split)


def test_what_waits_for_its_weight_gradients_stays_within_the_fullest_stage():
    plan = chain(*[1] * 8)  # a chunk holds 2 bytes and defers 0.8: two chunks at the first stage hold 4
    made = check(split_where_faster(plan, context(2)))
    waiting = list(accumulate({"F": 0, "B": 1, "W": -1}[op.kind] for op in made.order[1]))
    assert max(waiting) > 1
    assert max(peaks_of_stage(made, 1))[0] <= max(peaks_of_stage(made, 0))[0] == peak_bytes(ordered(plan, context(2)))
    memory = plan.limits.memory.model_copy(update={"deferred_bytes_per_token": 2 * 100.0})
    heavy = replace(plan, limits=replace(plan.limits, memory=memory))
    assert not any(split_where_faster(heavy, context(2)).split)


def test_backwards_stay_whole_where_the_host_cannot_split_them():
    plan = chain(1, 1, 1)
    assert any(split_where_faster(plan, context(2)).split)
    limits = replace(plan.limits, splits_backward=False)
    given_order = ordered(plan, context(2)).order
    made = replace(plan, limits=limits, order=given_order)
    assert Placing(made, context(2), math.inf, splits=False).placed() is made


def test_plans_with_own_backward_groups_keep_their_order_and_may_split():
    lengths = [3, 3, 2, 8]
    alone = tuple(MicroBatch((Slice(i, 0, n),), (0,)) for i, n in enumerate(lengths))
    together = MicroBatch((Slice(0, 0, 3), Slice(1, 0, 3)), (0,))
    order = (*(Op("F", i) for i in range(4)), *(Op("B", j) for j in range(3)))
    bare = StepPlan(as_lengths(lengths), alone, LIMITS)
    plan = check(replace(bare, order=(order, order), backward=(alone[3], alone[2], together), replayed=(2,)))
    assert ordered(plan, context(2), extra=3) is plan
    made = check(split_where_faster(plan, context(2)))
    assert without_weights(made) == [list(order)] * 2
    # B0 is the fullest moment: there is no room for what it would defer.
    assert words(made)[1] == "F0 F1 F2 F3 B0 B1 B2 W1 W2"
    assert simulate(made, context(2)).step_s < simulate(plan, context(2)).step_s


@given(
    chains=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    singles=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    stages=st.integers(1, 5),
    extra=st.integers(0, 3),
    memory=st.sampled_from([1.0, 1.3, 9.0]),
)
def test_ranks_that_share_micro_batches_run_rounds_in_which_these_meet(chains, singles, stages, extra, memory):
    """Chains of slices on ranks 0 and 2, then sequences of each rank alone: a circle of waiting breaks a law."""
    lengths = [4 * count for count in chains] + [3] * sum(singles)
    shared = [Slice(i, 4 * k, 4 * k + 4) for i, count in enumerate(chains) for k in range(count)]
    ranks = [rank for rank, count in enumerate(singles) for _ in range(count)]
    alone = [MicroBatch((Slice(len(chains) + k, 0, 3),), (rank,)) for k, rank in enumerate(ranks)]
    batches = (*(MicroBatch((s,), (0, 2), cp_comm="all_gather") for s in shared), *alone)
    plan = StepPlan(as_lengths(lengths), batches, replace(LIMITS, num_ranks=3, num_stages=stages))
    made = check(split_where_faster(plan, context(stages, ranks=3), extra, memory))
    ordinary = ordered(plan, context(stages, ranks=3), extra=extra)
    assert without_weights(made) == [list(ops) for ops in ordinary.order]
    assert peak_bytes(made) <= memory * peak_bytes(ordinary) * (1 + 1e-9)
    for stage in range(stages):
        rows = orders_of_stage(made, stage)
        met = [[op for op in rows[rank] if op.micro_batch < len(shared)] for rank in (0, 2)]
        assert met[0] == met[1]


def test_weight_gradients_of_shared_micro_batches_fill_waits():
    limits = replace(LIMITS, num_ranks=2)
    chain_of_two = [MicroBatch((Slice(0, a, a + 4),), (0, 1), cp_comm="all_gather") for a in (0, 4)]
    batches = (*chain_of_two, *(MicroBatch((Slice(1 + k, 0, 2),), (k % 2,)) for k in range(4)))
    plan = StepPlan(as_lengths([8, 2, 2, 2, 2]), batches, limits)
    made = check(split_where_faster(plan, context(2, ranks=2), times=9.0))
    assert {0, 1} & set(made.split[1])
    whole = ordered(plan, context(2, ranks=2))
    assert simulate(made, context(2, ranks=2)).step_s < simulate(whole, context(2, ranks=2)).step_s


def test_a_shared_micro_batch_that_is_in_no_round_of_its_ranks_keeps_its_order():
    limits = replace(LIMITS, num_ranks=2)
    batches = (MicroBatch((Slice(1, 0, 2),), (1,)), MicroBatch((Slice(0, 0, 8),), (0, 1), cp_comm="ring"))
    plan = StepPlan(as_lengths([8, 2]), batches, limits)
    assert split_where_faster(plan, context(2, ranks=2)) is plan


def long_tailed(seed, stages):
    """A few long sequences in chunks of equal cost, longest first, then packs of short ones; hand-overs take time."""
    draw = np.random.default_rng(seed)
    lengths = np.sort(np.clip(draw.lognormal(6.0, 1.4, 96), 8, 12_000)).astype(int)[::-1]
    costs = Costs(
        source="attention doubles the cost of the longest",
        forward=PassCost(token_s=1e-3 / stages, pair_s=1e-7 / stages),
        backward=PassCost(token_s=2e-3 / stages, pair_s=2.5e-7 / stages),
    )
    price = costs.forward.plus(costs.backward)
    cost = price.seconds(lengths.astype(float))
    each = cost.sum() / 100
    packs, pack = [], []
    for i, length in enumerate(lengths.tolist()):
        if cost[i] > each:
            packs += [[s] for s in evenly(i, length, round(cost[i] / each), price, 1 << 20, 4)]
            continue
        pack.append(Slice(i, 0, length))
        if sum(cost[s.sequence] for s in pack) > 0.8 * each:
            packs, pack = [*packs, pack], []
    packs += [pack] if pack else []
    batches = tuple(MicroBatch(tuple(p), (0,)) for p in packs)
    limits = replace(LIMITS, num_stages=stages, max_tokens=1 << 20)
    return StepPlan(as_lengths(lengths), batches, limits), context(stages, costs, state_bytes_per_token=1e-4 / stages)


def chain_by_chain(plan):
    """One chain after the other in 1F1B slots, as plans that know nothing of pipelines have it."""
    lines, last = lines_of(plan, 0), plan.limits.num_stages - 1
    rows = (in_slots(lines.forward, lines.backward, lines.need, last - stage) for stage in range(last + 1))
    return replace(plan, order=tuple(map(tuple, rows)))


def test_backwards_overtake_forwards_that_have_not_arrived_where_that_ends_sooner():
    gains = []
    for seed in range(3):
        for stages in (2, 4):
            plan, at = long_tailed(seed, stages)
            lines, clock = lines_of(plan, 0), clock_of(plan, at)
            slots = [in_slots(lines.forward, lines.backward, lines.owed, stages - 1 - stage) for stage in range(stages)]
            gains.append(end_of(slots, clock) - end_of(ordered(plan, at).order, clock))
    assert min(gains) == 0, "slots are the better order now and then"
    assert max(gains) > 0


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bubbles_shrink_with_the_order_the_forwards_ahead_and_the_weight_passes(seed, stages):
    plan, at = long_tailed(seed, stages)
    assert max(sum(s.sequence == 0 for s in m.slices) for m in plan.micro_batches) == 1
    assert sum(any(s.sequence == 0 for s in m.slices) for m in plan.micro_batches) >= 8
    tries = [chain_by_chain(plan), ordered(plan, at), ordered(plan, at, extra=1), split_where_faster(plan, at, extra=1)]
    bubbles = [simulate(check(one), at, record=False).bubble_frac for one in tries]
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[1] < 0.9 * bubbles[0]
    assert bubbles[2] < 0.6 * bubbles[0]
    assert bubbles[3] < 0.5 * bubbles[0]
    flights = [in_flight(one.order[0]) for one in tries]
    assert flights[1] <= flights[0], "the order alone takes no more chunks than the longest sequence needs"
    assert flights[1] <= flights[2] <= flights[1] + stages - 1
