"""The memory model against plans whose peaks are counted by hand; bytes are small whole numbers."""

from dataclasses import replace

import pytest
from evenload.core.costs.memory import fixed_bytes, offloaded_bytes, peak_activation_bytes, peaks_of_stage
from evenload.core.laws import check
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.planning.setting import Setting, context_of, limits_of
from evenload.core.recipe.recipe import parse
from evenload.core.simulate.step import simulate

from ..by_hand import alone as one_by_one
from ..by_hand import ops

LAYERS = 2
LIMITS = Limits(
    1,
    1000,
    layers_per_stage=LAYERS,
    memory=MemoryCost(
        activation_bytes_per_token=LAYERS * 100.0,
        kv_bytes_per_token=LAYERS * 2.0,
        kv_grad_bytes_per_token=LAYERS * 4.0,
        cut_saves_bytes_per_token=LAYERS * 3.0,
        input_bytes_per_token=8.0,
        head_bytes_per_token=20.0,
        head_working_bytes_per_token=30.0,
        working_bytes_per_token=5.0,
        pass_bytes=7.0,
    ),
)


def changed(limits=LIMITS, **memory):
    return replace(limits, memory=limits.memory.model_copy(update=memory))


def whole(*lengths, limits=LIMITS, order=""):
    """A micro-batch for each length."""
    return StepPlan(as_lengths(lengths), one_by_one(lengths), limits, (ops(order),) if order else ())


def cut(limits=LIMITS, replayed=()):
    """One sequence of 30 tokens in slices of 10."""
    micro_batches = tuple(MicroBatch((Slice(0, at, at + 10),), (0,)) for at in (0, 10, 20))
    return check(StepPlan(as_lengths([30]), micro_batches, limits, (ops("F0 F1 F2 B2 B1 B0"),), replayed=replayed))


RECOMPUTED = changed(activation_bytes_per_token=LAYERS * 8.0, replay_bytes_per_token=LAYERS * 100.0)
SPLIT = changed(replace(LIMITS, splits_backward=True), deferred_bytes_per_token=LAYERS * 60.0)
LATE = changed(gradient_bytes=10_000.0)
CUT = 2 * (100 - 3) + 20  # a token of a slice with its head, whose K and V are stored once
KV, DKV = 30 * 2 * 2, 20 * 4 * 2  # of all tokens, and of those before the last slice


def beside_a_whole_one():
    """The last slice of a sequence of three in one micro-batch with 5 tokens of another one."""
    mixed = MicroBatch((Slice(0, 20, 30), Slice(1, 0, 5)), (0,))
    return check(replace(cut(), lengths=[30, 5], micro_batches=(*cut().micro_batches[:2], mixed)))


PEAKS = {
    # 10 tokens: two layers of 100, the head's 20, and 30 more while it runs backward.
    "a pass needs more while it runs than it keeps": (whole(10), 10 * (2 * 100 + 20 + 30) + 7, "B0"),
    # The head has let go of what it kept when the first layer runs backward.
    "a layer that needs more than the head is the peak": (
        whole(10, limits=changed(working_bytes_per_token=60.0)),
        10 * (2 * 100 + 60) + 7,
        "B0",
    ),
    "micro-batches that wait are held with their heads": (
        whole(10, 40, 20, order="F0 F1 F2 B2 B1 B0"),
        70 * 220 + 20 * 30 + 7,
        "B2",
    ),
    "those that run in turn are not": (whole(10, 40, 20, order="F0 B0 F1 B1 F2 B2"), 40 * 250 + 7, "B1"),
    # At the first backward there are no dK and dV but the first layer's.
    "slices keep less, as keys and values are stored once": (cut(), 3 * 10 * CUT + KV + 10 * 30 + 7, "B2"),
    # dK and dV of 30 tokens from the kernel, of 20 added up in one layer; a quarter of the layer is gone by then.
    "attention over a long prefix gives gradients of all of it": (
        cut(changed(kv_bytes_per_token=LAYERS * 200.0)),
        3 * 10 * CUT + 30 * 200 * 2 - 10 * 20 + (30 * 200 - 10 * (100 - 3) / 4 + 20 * 4) + 7,
        "B2",
    ),
    "cut sequences beside whole ones save nothing": (
        beside_a_whole_one(),
        2 * 10 * CUT + 15 * (2 * 100 + 20) + KV + 15 * 30 + 7,
        "B2",
    ),
    # One slice with its head at a time.
    "two slices are replayed": (cut(replayed=(0, 1)), KV + DKV + 10 * (CUT + 30) + 7, "B1"),
    # 8 bytes a layer and token are kept, of 100 while the layer runs again.
    "the recipe recomputes": (whole(10, limits=RECOMPUTED), 10 * (2 * 8 + (100 - 8) + 5) + 7, "B0"),
    "the plan recomputes one of two layers": (
        replace(whole(10, order="F0 B0"), recompute=((1,),)),
        10 * (100 + 8 + (100 - 8) + 5) + 7,
        "B0",
    ),
    "the plan recomputes both, and the head is large": (
        replace(whole(10, order="F0 B0", limits=changed(head_working_bytes_per_token=500.0)), recompute=((2,),)),
        10 * (2 * 8 + 20 + 500) + 7,
        "B0",
    ),
    "a split backward keeps what its weight gradients need": (
        whole(10, 10, order="F0 B0 F1 B1 W0 W1", limits=SPLIT),
        10 * 250 + 7 + 10 * 60 * LAYERS,
        "B1",
    ),
    "until they run": (whole(10, 10, order="F0 B0 W0 F1 B1 W1", limits=SPLIT), 10 * 250 + 7, "B0"),
    # Before the last layer of the only micro-batch runs backward the other layer's gradients are made.
    "late gradients are there from the first backward on": (whole(10, limits=LATE), 5_000 + 10 * (100 + 5) + 7, "B0"),
    "all of them by the second": (whole(10, 10, order="F0 B0 F1 B1", limits=LATE), 10_000 + 10 * 250 + 7, "B1"),
}


@pytest.mark.parametrize(("plan", "peak", "at"), PEAKS.values(), ids=PEAKS)
def test_the_peak_of_a_rank_is_that_by_hand(plan, peak, at):
    assert peak_activation_bytes(plan, 0, 0) == (peak, *ops(at))


def test_only_the_last_stage_has_a_head():
    plan = whole(10, 10, 10, limits=replace(LIMITS, num_stages=2))
    # Stage 0 runs one forward ahead; its last layer runs backward first.
    assert peaks_of_stage(plan, 0) == [(2 * 10 * 200 + 10 * 5 + 7, Op("B", 0))]
    assert peaks_of_stage(plan, 1) == [(10 * 250 + 7, Op("B", 0))]


def test_a_replay_behind_the_first_stage_keeps_its_input():
    plan = cut(replayed=(0, 1))
    plan = check(replace(plan, limits=replace(LIMITS, num_stages=2), order=2 * plan.order))
    first, last = (peaks_of_stage(plan, stage)[0][0] for stage in (0, 1))
    assert first == KV + DKV + 10 * 2 * 97 + 10 * 5 + 7
    assert last == KV + DKV + 2 * 10 * 8 + 10 * (CUT + 30) + 7


def test_shared_micro_batches_are_divided_by_their_ranks():
    alone = whole(40)
    limits = replace(LIMITS, num_ranks=2)
    shared = replace(alone, limits=limits, micro_batches=(alone.micro_batches[0]._replace(ranks=(0, 1)),))
    expected = (peak_activation_bytes(alone, 0, 0)[0] - 7) / 2 + 7
    assert [peak for peak, _ in peaks_of_stage(shared, 0)] == [expected, expected]


def test_ranks_hold_the_slices_that_are_at_home_with_them():
    """40 tokens on ranks 0 and 1, 10 more on rank 1."""
    m = MicroBatch((Slice(0, 0, 40), Slice(1, 0, 10)), (0, 1), cp_comm="ring", cp_groups=((0, 1), (1,)))
    plan = check(StepPlan(as_lengths([40, 10]), (m,), replace(LIMITS, num_ranks=2)))
    assert [peak for peak, _ in peaks_of_stage(plan, 0)] == [20 * 250 + 7, 30 * 250 + 7]
    moved = check(replace(plan, micro_batches=(m._replace(remap=True),)))
    assert [peak for peak, _ in peaks_of_stage(moved, 0)] == [25 * 250 + 7, 25 * 250 + 7]


def test_prefixes_are_held_where_their_slices_are_at_home():
    """Three slices of 10: on rank 0, on rank 0, on ranks 0 and 1 beside 6 tokens of rank 1 alone."""
    grown = MicroBatch((Slice(0, 20, 30), Slice(1, 0, 6)), (0, 1), cp_comm="ring", cp_groups=((0, 1), (1,)))
    alone = [MicroBatch((Slice(0, at, at + 10),), (0,)) for at in (0, 10)]
    limits = replace(LIMITS, num_ranks=2)
    plan = check(StepPlan(as_lengths([30, 6]), (*alone, grown), limits, (ops("F0 F1 F2 B2 B1 B0"),)))
    (first, at_first), (second, at_second) = peaks_of_stage(plan, 0)
    # Rank 0 keeps K and V of 25 tokens, and saves on all it holds, which is cut; rank 1 of 5, beside a whole sequence.
    of_slices = (2 * 10 + 5) * CUT
    assert (first, at_first) == (of_slices + 25 * 2 * 2 + 5 * 30 + 7, Op("B", 2))
    assert (second, at_second) == (11 * (2 * 100 + 20) + 5 * 2 * 2 + 11 * 30 + 7, Op("B", 2))


def test_gradients_of_a_prefix_are_booked_where_its_tokens_are():
    """The same with a large gradient of K and V: rank 0 has 20 tokens before the last slice, rank 1 none."""
    grown = MicroBatch((Slice(0, 20, 30),), (0, 1), cp_comm="ring")
    alone = [MicroBatch((Slice(0, at, at + 10),), (0,)) for at in (0, 10)]
    order = (ops("F0 F1 F2 B2 B1 B0"),)
    peaks = {}
    for gradient in (0.0, 1000.0):
        limits = changed(replace(LIMITS, num_ranks=2), kv_grad_bytes_per_token=LAYERS * gradient)
        plan = check(StepPlan(as_lengths([30]), (*alone, grown), limits, order))
        peaks[gradient] = [peak for peak, _ in peaks_of_stage(plan, 0)]
    assert peaks[1000.0][1] == peaks[0.0][1]
    # At the end of B2, with one layer of 5 tokens left, both layers' gradients of 20 tokens are there.
    held = 2 * 10 * CUT + 25 * 2 * 2 + 20 * 1000 * 2
    assert peaks[1000.0][0] == held + 5 * (100 - 3 + 5) + 7


def test_what_waits_in_host_memory_is_not_on_the_device():
    """Six layers of 100 bytes a token: three quarters of four of them away, and one such share on its way."""
    limits = changed(replace(LIMITS, layers_per_stage=6), activation_bytes_per_token=6 * 100.0)
    plan = check(replace(whole(10, 40, order="F0 F1 B1 B0", limits=limits), offload=(0.75, 0.0)))
    kept = 10 * (6 * 100 - 0.75 * 4 * 100 + 20)
    assert peak_activation_bytes(plan, 0, 0) == (kept + 40 * (600 + 50) + 7, Op("B", 1))
    alone = check(replace(whole(10, limits=limits), offload=(0.75,)))
    assert peak_activation_bytes(alone, 0, 0) == (kept + 10 * (75 + 30) + 7, Op("B", 0))
    assert offloaded_bytes(alone, 0, 0, 10) == pytest.approx(10 * 0.75 * 4 * 100)
    # The first and the last layer stay.
    two = check(replace(whole(10), offload=(0.75,)))
    assert peak_activation_bytes(two, 0, 0) == peak_activation_bytes(whole(10), 0, 0)


MEMORY = MemoryCost(
    fixed_bytes=1600.0,
    sharded_bytes=1200.0,
    gradient_bytes=400.0,
    update_bytes=50.0,
    pass_bytes=8.0,
    activation_bytes_per_token=64.0,
    cut_saves_bytes_per_token=16.0,
    head_bytes_per_token=12.0,
    head_working_bytes_per_token=4.0,
    working_bytes_per_token=6.0,
    kv_bytes_per_token=32.0,
)


def test_a_stage_has_its_share_of_the_layers_and_a_whole_head():
    stage = MEMORY.of_stage(Layout(tp=2, pp=4))
    assert (stage.fixed_bytes, stage.activation_bytes_per_token, stage.cut_saves_bytes_per_token) == (200.0, 8.0, 2.0)
    assert (stage.head_bytes_per_token, stage.head_working_bytes_per_token) == (6.0, 2.0)
    assert (stage.working_bytes_per_token, stage.pass_bytes) == (3.0, 4.0)
    assert stage.gradient_bytes == 50.0


def test_ranks_divide_what_is_sharded_and_nothing_else():
    assert [fixed_bytes(MEMORY, Limits(n, 1)) for n in (1, 2, 4)] == [1600.0, 1000.0, 700.0]
    gathers = MEMORY.model_copy(update={"gathered_bytes": 30.0})
    assert [fixed_bytes(gathers, Limits(n, 1)) for n in (1, 2, 4)] == [1600.0, 1030.0, 730.0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"megatron.distributed_optimizer": False}, (16, 0, 0)),
        ({}, (16, 8, 0)),
        ({"train.dtype": "bf16"}, (18, 12, 0)),
        ({"trainer": "deepspeed", "deepspeed.zero_stage": 0}, (12, 0, 4)),
        ({"trainer": "deepspeed", "deepspeed.zero_stage": 2}, (16, 12, 4)),
        ({"trainer": "deepspeed", "deepspeed.zero_stage": 2, "train.dtype": "bf16"}, (14, 12, 2)),
        ({"trainer": "deepspeed", "deepspeed.zero_stage": 3}, (20, 20, 0, 4)),
    ],
)
def test_states_of_a_weight(changes, expected):
    recipe = parse({"train": {"global_batch_size": 4}, "model": {"vocab_size": 256}}).changed(changes)
    assert Setting.of_recipe(recipe).traits.states[: len(expected)] == expected
    memory = context_of(Setting.of_recipe(recipe), Layout()).costs.memory
    assert memory.gradient_bytes * expected[0] == memory.fixed_bytes * expected[2]


def test_a_simulated_rank_holds_its_states_and_the_larger_of_passes_and_update():
    recipe = parse({"train": {"global_batch_size": 4}, "model": {"num_layers": 2, "vocab_size": 256}})
    context = context_of(Setting.of_recipe(recipe), Layout())
    peaks = {}
    for update_bytes in (0.0, 1e9):
        memory = MEMORY.model_copy(update={"update_bytes": update_bytes})
        at = replace(context, costs=context.costs.model_copy(update={"memory": memory}))
        plan = whole(10, limits=replace(limits_of(Setting.of_recipe(recipe), at), max_tokens=100))
        peaks[update_bytes] = float(simulate(plan, at).peak_bytes[0, 0])
    passes = max(10 * (64 + 12 + 4), 200 + 10 * (32 + 6)) + 8
    assert peaks == {0.0: 1600 + passes, 1e9: 1600 + 1e9}
