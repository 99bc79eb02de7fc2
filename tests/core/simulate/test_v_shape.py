"""Two stages on each device: simulated by hand, and any lawful plan against walks that share nothing with evenload's.

Devices 0 and 1 have the stages 0 and 3, 1 and 2.
"""

from dataclasses import replace
from random import Random

import pytest
from evenload.core.balance.step_bound import passes_bound_s
from evenload.core.costs.context import PlanningContext, Traffic
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.costs.memory import levels_of_stage
from evenload.core.errors import PlanError
from evenload.core.laws import check
from evenload.core.machine.cluster import Link
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.order import orders_of_device, orders_of_stage
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.plan_json import read_step, step_json
from evenload.core.simulate.events import play
from evenload.core.simulate.step import simulate
from evenload.core.simulate.v_shape import merged
from hypothesis import given
from hypothesis import strategies as st

from ..by_hand import ONE, alone, nodes, ops

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=8)
LIMITS = Limits(1, 1000, num_stages=4, splits_backward=True, v_shape=True)


def plan_of(*rows, merge, limits=LIMITS):
    """Sequences of one token each, in these orders of the stages."""
    lengths, numbers = [1] * rows[0].count("F"), tuple(tuple(map(int, row)) for row in merge)
    return StepPlan(as_lengths(lengths), alone(lengths), limits, order=tuple(map(ops, rows)), merge=numbers)


def context(layout, **traffic):
    return PlanningContext(ONE, layout, nodes(), Traffic(**traffic))


def test_a_device_takes_its_stages_in_turn_and_hands_over_to_itself_at_once():
    made = check(plan_of("F0 B0", "F0 B0", "F0 B0", "F0 B0", merge=("0330", "1221")))
    result = simulate(made, context(Layout(pp=2, v_shape=True), state_bytes_per_token=0.5))
    began = {(span.stage, span.kind): span.start_s for span in result.spans}
    # Half a second from device to device, none from stage 1 to stage 2 and back.
    assert [began[stage, "F"] for stage in range(4)] == [0, 1.5, 2.5, 4]
    assert [began[stage, "B"] for stage in (3, 2, 1, 0)] == [5, 7.5, 9.5, 12]
    assert result.step_s == 14
    assert result.busy_s.tolist() == [[6], [6]]
    assert result.bubble_frac == pytest.approx(8 / 14)


def test_both_stages_share_the_link_to_a_device():
    rows = ("F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1", "F0 B0 F1 B1")
    made = check(plan_of(*rows, merge=("03303300", "12212121")))
    hops = {0: 4.0, 1: 0.0, 2: 4.0}
    starts = {(event.stage, event.op): event.start_s for event in play(made, lambda *_: 1.0, lambda s, _: hops[s])}
    # Device 0 sends B0 of stage 3 at 13, there at 17, and F1 of stage 0, ready at 14, when the link is free.
    assert starts[2, Op("B", 0)] == 17
    assert starts[1, Op("F", 1)] == 21


def test_a_device_holds_what_both_stages_do():
    memory = MemoryCost(activation_bytes_per_token=10.0, deferred_bytes_per_token=4.0, head_bytes_per_token=3.0)
    limits = replace(LIMITS, memory=memory)
    made = check(plan_of("F0 B0 W0", "F0 B0", "F0 B0", "F0 B0", merge=("03300", "1221"), limits=limits))
    # Stage 0 keeps 10 from its forward on, stage 3 has 10 and the head's 3.
    assert levels_of_stage(made, 3) == [[23.0, 23.0]]
    assert levels_of_stage(made, 0) == [[10.0, 14.0, 4.0]]
    assert simulate(made, context(Layout(pp=2, v_shape=True))).activation_bytes.tolist() == [[23.0], [20.0]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"merge": ()}, "does not say in which order"),
        ({"merge": ((0, 3, 3), (1, 2, 2, 1))}, "every pass of its stages"),
        ({"merge": ((0, 3, 3, 3), (1, 2, 2, 1))}, "every pass of its stages"),
        ({"merge": ((0, 1, 3, 0), (3, 2, 2, 1))}, "every pass of its stages"),
        ({"merge": ((3, 3, 0, 0), (1, 2, 2, 1))}, "deadlocks"),
        ({"limits": replace(LIMITS, v_shape=False)}, "devices of their own"),
        ({"limits": replace(LIMITS, in_step=2, num_ranks=2)}, "wait for each other in a pass"),
    ],
)
def test_a_merge_takes_every_pass_once_and_waits_for_nothing_in_a_circle(changes, words):
    made = plan_of(*(("F0 B0",) * 4), merge=("0330", "1221"))
    check(made)
    with pytest.raises(PlanError, match=words):
        check(replace(made, **changes))


def test_what_is_shared_by_ranks_is_refused():
    limits = replace(LIMITS, num_ranks=2)
    micro_batch = MicroBatch((Slice(0, 0, 4),), (0, 1), cp_comm="ring")
    made = StepPlan(as_lengths([4]), (micro_batch,), limits, (ops("F0 B0"),) * 4, merge=((0, 3, 3, 0), (1, 2, 2, 1)))
    with pytest.raises(PlanError, match="wait for each other"):
        check(made)


def test_plans_of_a_v_are_written_and_told_apart():
    made = check(plan_of(*("F0 F1 B0 B1",) * 4, merge=("00333300", "12122211")))
    other = check(replace(made, merge=((0, 0, 3, 3, 3, 3, 0, 0), (1, 1, 2, 2, 2, 2, 1, 1))))
    assert made.digest != other.digest
    assert read_step(step_json(made)).merge == made.merge
    assert read_step(step_json(made)).limits.v_shape
    assert "merge" not in step_json(replace(made, merge=(), limits=replace(LIMITS, v_shape=False)))


def drawn(seed, lengths, ranks, devices):
    from harness.proof.pipelines import random_pipeline

    sizes = {"num_ranks": ranks, "num_stages": 2 * devices, "layers_per_stage": 2}
    return random_pipeline(Random(seed), lengths, **sizes, recompute="none", v_shape=True)


@given(st.integers(0, 10**9), LENGTHS, st.integers(1, 2), st.integers(2, 4), st.floats(0, 3))
def test_passes_begin_when_an_independent_walk_says(seed, lengths, ranks, devices, hop):
    """Starts are lowered onto nothing but what each pass waits for, again and again, until they stay."""
    plan = drawn(seed, lengths, ranks, devices)
    last, took = 2 * devices - 1, {"F": 1.0, "B": 2.5, "W": 0.75}
    device_of = [min(stage, last - stage) for stage in range(last + 1)]
    rows = {(d, r): orders_of_device(plan, d)[r] for d in range(devices) for r in range(ranks)}
    rank_of = {"F": [m.ranks[0] for m in plan.micro_batches], "B": [m.ranks[0] for m in plan.passes("B")]}
    rank_of["W"] = rank_of["B"]
    starts = {(stage, op): 0.0 for row in rows.values() for stage, op in row}

    def arrives(stage, op, to):
        """At a stage, of what another sent: behind all that its device sent the same way before."""
        device, way = device_of[stage], device_of[to] - device_of[stage]
        at = 0.0
        for own, other in rows[device, rank_of[op.kind][op.micro_batch]]:
            target = own + {"F": 1, "B": -1, "W": 99}[other.kind]
            if 0 <= target <= last and device_of[target] - device == way:
                at = max(at, starts[own, other] + took[other.kind]) + (hop if way else 0.0)
            if (own, other) == (stage, op):
                return at
        raise AssertionError(stage, op)

    for _ in range(len(starts) + 1):
        before = dict(starts)
        for row in rows.values():
            free = 0.0
            for stage, op in row:
                source = stage + {"F": -1, "B": 1, "W": 99}[op.kind]
                came = arrives(source, op, stage) if 0 <= source <= last else 0.0
                starts[stage, op] = max(free, came)
                free = starts[stage, op] + took[op.kind]
        if starts == before:
            break
    else:
        raise AssertionError("starts that never stay")
    hops = lambda stage, op: hop if device_of[stage] != device_of[stage + 1] else 0.0  # noqa: E731
    played = {(e.stage, e.op): e.start_s for e in play(plan, lambda _, op: took[op.kind], hops)}
    assert played == pytest.approx(starts)


@given(st.integers(0, 10**9), LENGTHS, st.integers(1, 2), st.integers(2, 4))
def test_devices_hold_what_an_independent_count_says(seed, lengths, ranks, devices):
    plan = drawn(seed, lengths, ranks, devices)
    memory = MemoryCost(activation_bytes_per_token=8.0, deferred_bytes_per_token=3.0, head_bytes_per_token=2.0)
    plan = replace(plan, limits=replace(plan.limits, memory=memory))
    last = 2 * devices - 1
    for device in range(devices):
        for rank in range(ranks):
            held, levels = 0.0, {device: [], last - device: []}
            splits = {stage: {op.micro_batch for op in plan.order[stage] if op.kind == "W"} for stage in levels}
            for stage, op in orders_of_device(plan, device)[rank]:
                tokens = sum(s.stop - s.start for s in plan.micro_batches[op.micro_batch].slices)
                kept = tokens * (8.0 + (2.0 if stage == last else 0.0))
                left = tokens * 3.0 if op.micro_batch in splits[stage] else 0.0
                layer = tokens * 4.0
                after = held + {"F": kept, "B": left - kept, "W": -left}[op.kind]
                # A backward is highest where it begins, or at its last layer, of which all is still there.
                levels[stage].append(max(held, after + layer) if op.kind == "B" else max(held, after))
                held = after
            for stage, row in levels.items():
                assert levels_of_stage(plan, stage)[rank] == pytest.approx(row), (device, stage)


@given(st.integers(0, 10**9), LENGTHS, st.integers(1, 2), st.integers(2, 4), st.floats(0, 1))
def test_no_plan_of_a_v_is_below_the_bound(seed, lengths, ranks, devices, head):
    plan = drawn(seed, lengths, ranks, devices)
    costs = Costs(
        source="a", forward=PassCost(launch_s=0.5, token_s=1.0, pair_s=0.1), backward=PassCost(launch_s=1, token_s=2.0)
    )
    link = Link(latency_s=0.1, bytes_per_s=1.0)
    layout = Layout(pp=devices, dp=ranks, v_shape=True)
    at = PlanningContext(costs, layout, nodes(link=link), Traffic(state_bytes_per_token=0.1), head / (2 * devices))
    least_s = passes_bound_s(plan.lengths, plan.limits, at)
    assert 0 < least_s <= simulate(plan, at, record=False).passes_s * (1 + 1e-9)


def test_any_plan_gets_an_order_of_its_devices():
    for stages in (4, 6, 8):
        limits = Limits(2, 10, num_stages=stages, v_shape=True)
        bare = StepPlan(as_lengths([3] * 7), alone([3] * 7, [i % 2 for i in range(7)]), limits)
        made = check(merged(bare))
        assert merged(made) is made
        for stage in range(stages):
            plain = replace(bare, limits=replace(limits, v_shape=False))
            assert orders_of_stage(made, stage) == orders_of_stage(plain, stage)
