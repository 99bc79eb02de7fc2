"""Every law of a plan has a plan that breaks it and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from evenload.core.costs.memory import peak_activation_bytes
from evenload.core.errors import PlanError
from evenload.core.laws import check, check_policy
from evenload.core.plan.expert_policy import ExpertPolicy
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.plan_json import read_step, step_json

from .by_hand import alone, ops

LIMITS = Limits(num_ranks=2, max_tokens=8, num_stages=2, layers_per_stage=4)


LAWFUL = StepPlan(
    as_lengths([12, 5, 3]),
    (
        MicroBatch((Slice(0, 0, 7),), (0,)),
        MicroBatch((Slice(0, 7, 12), Slice(2, 0, 3)), (0,)),
        MicroBatch((Slice(1, 0, 5),), (1,)),
    ),
    LIMITS,
    order=(ops("F0 F1 F2 B1 B0 B2"), ops("F0 F1 B1 F2 B0 B2")),
    recompute=((0, 4, 2), (1, 0, 0)),
)
SPLIT = replace(
    LAWFUL, limits=replace(LIMITS, splits_backward=True), order=(ops("F0 F1 F2 B1 B0 W1 B2 W0"), LAWFUL.order[1])
)
WHOLE = StepPlan(as_lengths([4, 4]), alone([4, 4], (0, 1)), replace(LIMITS, num_stages=1))
FIRST, SECOND = LAWFUL.order
M0, M1, M2 = LAWFUL.micro_batches


def lawful(*batches, **changes):
    return replace(LAWFUL, **changes, **({"micro_batches": batches} if batches else {}))


def whole(*batches, **limits):
    return replace(WHOLE, micro_batches=batches or WHOLE.micro_batches, limits=replace(WHOLE.limits, **limits))


def test_lawful_plans_pass():
    assert check(LAWFUL) is LAWFUL
    assert check(SPLIT).split == ({0, 1}, set())
    assert check(WHOLE) is WHOLE


ONE, OTHER = WHOLE.micro_batches
BOTH = (Slice(0, 0, 4), Slice(1, 0, 4))
BROKEN = {
    "token missing at the end": (whole(MicroBatch((Slice(0, 0, 3), BOTH[1]), (0,))), "missing"),
    "token missing in between": (lawful(M0, MicroBatch((Slice(0, 8, 12), Slice(2, 0, 3)), (0,)), M2), "missing"),
    "sequence missing": (whole(ONE), "missing"),
    "token repeated": (lawful(M0, MicroBatch((Slice(0, 6, 12),), (0,)), M2), "twice"),
    "sequence repeated": (whole(ONE, OTHER, ONE), "twice"),
    "outside": (whole(MicroBatch((Slice(0, 0, 5),), (0,)), OTHER), "outside"),
    "unknown sequence": (whole(ONE, OTHER, MicroBatch((Slice(7, 0, 1),), (0,))), "not in the batch"),
    "empty slice": (whole(ONE, OTHER, MicroBatch((Slice(1, 2, 2),), (0,))), "outside"),
    "tenants of other sequences": (replace(WHOLE, tenants=[0]), "one tenant for each sequence"),
    "a tenant below 0": (replace(WHOLE, tenants=[0, -1]), "tenant's number is below 0"),
    "lengths in a square": (replace(WHOLE, lengths=np.ones((2, 2), dtype=np.int64)), "not a row of integers"),
    "no such rank": (whole(ONE, OTHER._replace(ranks=(2,))), "ranks"),
    "rank twice": (whole(ONE, OTHER._replace(ranks=(1, 1))), "ranks"),
    "no rank": (whole(ONE, OTHER._replace(ranks=())), "ranks"),
    "dummy on two ranks": (whole(ONE, OTHER, MicroBatch((), (0, 1))), "no token"),
    "over the cap": (whole(max_tokens=3), "token cap"),
    "padding over the cap": (whole(ONE, OTHER._replace(pad_to=9)), "token cap"),
    "padding too short": (whole(ONE, OTHER._replace(pad_to=3)), "padding"),
    "out of order": (lawful(M1, M0, M2, order=()), "out of order"),
    "two slices in one micro-batch": (
        lawful(
            MicroBatch((Slice(0, 0, 4), Slice(0, 4, 8)), (0,)), MicroBatch((Slice(0, 8, 12), Slice(2, 0, 3)), (0,)), M2
        ),
        "two slices",
    ),
    "away from its prefix": (lawful(M0, M1._replace(ranks=(1,)), M2), "prefix KV"),
    "unequal counts": (whole(ONE, OTHER, MicroBatch((), (0,)), all_in_step=True), "equal micro-batch counts"),
    "cut without an order": (lawful(order=()), "freed before"),
    "stage missing": (lawful(order=(FIRST,)), "number of stages"),
    "pass missing": (lawful(order=(FIRST, ops("F0 F1 B1 F2 B0"))), "exactly once"),
    "pass twice": (lawful(order=(FIRST, ops("F0 F1 B1 F2 B0 B2 B2"))), "exactly once"),
    "backward first": (lawful(order=(FIRST, ops("F0 F1 B1 B2 F2 B0"))), "before forward"),
    "slice before its prefix": (lawful(order=(FIRST, ops("F1 F0 B1 F2 B0 B2"))), "before its prefix"),
    "KV freed too early": (lawful(order=(FIRST, ops("F0 F1 B0 F2 B1 B2"))), "still needs"),
    "stages wait for each other": (
        lawful(M0, M1, M2._replace(ranks=(0,)), order=(ops("F0 F1 B1 F2 B0 B2"), ops("F0 F1 F2 B1 B0 B2"))),
        "rank 0 of stage 0 waits at B1",
    ),
    "recompute of one stage": (lawful(recompute=((0, 0, 0),)), "every"),
    "recompute of too many layers": (lawful(recompute=((0, 5, 0), (0, 0, 0))), "do not exist"),
    "weight gradients where the host has none": (replace(SPLIT, limits=LIMITS), "in the backward only"),
    "weight gradients first": (replace(SPLIT, order=(ops("F0 F1 F2 B1 W0 B0 B2"), SECOND)), "before their backward"),
    "weight gradients of nothing": (
        replace(SPLIT, order=(ops("F0 F1 F2 B1 B0 B2 W3"), SECOND)),
        "before their backward",
    ),
    "weight gradients twice": (replace(SPLIT, order=(ops("F0 F1 F2 B1 W1 B0 B2 W1"), SECOND)), "computed twice"),
    "shared where each runs alone": (
        replace(whole(MicroBatch(BOTH, (0, 1), cp_comm="ring")), limits=replace(LIMITS, whole_sequences=True)),
        "every micro-batch on one rank",
    ),
    "unknown engine": (whole(MicroBatch(BOTH, (0, 1), cp_comm="tree")), "cp_comm"),
    "a CP group elsewhere": (lawful(M0, M1._replace(ranks=(1,), cp_groups=((0,), (1,))), M2), "not among the ranks"),
    "in step with stages": (lawful(limits=replace(LIMITS, all_in_step=True)), "no pipeline stages"),
    "a group in step": (lawful(limits=replace(LIMITS, in_step=LIMITS.num_ranks)), "run different passes"),
    "in step, a pass of nothing": (
        replace(whole(MicroBatch(BOTH, (0, 1), cp_comm="ring"), all_in_step=True), order=(ops("F0 B1"),)),
        "exactly once",
    ),
    "memory": (
        lawful(limits=replace(LIMITS, max_activation_bytes=40.0, memory=MemoryCost(activation_bytes_per_token=4.0))),
        "memory cap",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_law_refuses(name):
    plan, message = BROKEN[name]
    with pytest.raises(PlanError, match=message) as caught:
        check(plan)
    assert caught.value.do


def test_memory_counts_what_is_alive():
    """By hand, stage 0 of rank 0: F0 keeps 7 tokens x 4 layers and KV of 12 tokens; B1 computes one layer again."""
    limits = replace(LIMITS, memory=MemoryCost(activation_bytes_per_token=4 * 10.0, kv_bytes_per_token=4 * 1.0))
    plan = replace(LAWFUL, limits=limits)
    assert peak_activation_bytes(plan, 0, 0) == (7 * 4 * 10 + 12 * 4 * 1 + 8 * 10, Op("B", 1))
    # Stage 1 recomputes one layer of micro-batch 0 and none of 1: 7 * 3 * 10 + 48 before 8 * 4 * 10 more.
    assert peak_activation_bytes(plan, 1, 0) == (7 * 3 * 10 + 48 + 8 * 4 * 10, Op("F", 1))


def test_digest_tells_plans_apart():
    same = read_step(step_json(LAWFUL), LIMITS)
    assert same.digest == LAWFUL.digest
    others = [
        lawful(order=(SECOND, SECOND)),
        lawful(recompute=()),
        whole(OTHER, ONE),
        whole(ONE, OTHER._replace(ranks=(0,))),
        whole(ONE, OTHER._replace(pad_to=5)),
        whole(MicroBatch(BOTH, (0,))),
        WHOLE,
        LAWFUL,
    ]
    assert len({plan.digest for plan in others}) == len(others)


HALVES = (
    MicroBatch((Slice(0, 0, 6),), (0,)),
    MicroBatch((Slice(0, 6, 12),), (0,)),
    MicroBatch((Slice(1, 0, 5),), (0,)),
)
ASYMMETRIC = StepPlan(
    as_lengths([12, 5]),
    HALVES,
    replace(LIMITS, num_stages=1),
    order=(ops("F0 F1 F2 B0 B1 B2"),),
    backward=(MicroBatch((Slice(0, 8, 12),), (0,)), MicroBatch((Slice(0, 0, 8),), (0,)), HALVES[2]),
    replayed=(0, 1),
)


def test_an_asymmetric_plan_is_lawful_and_survives_json():
    assert check(ASYMMETRIC).forward_of == (None, None, 2)
    assert ASYMMETRIC.kept == {2}
    assert ASYMMETRIC.cut == {0}
    again = read_step(step_json(ASYMMETRIC), ASYMMETRIC.limits)
    assert again.digest == ASYMMETRIC.digest
    assert check(replace(ASYMMETRIC, replayed=(0, 1, 2))).digest != again.digest


B0, B1, B2 = ASYMMETRIC.backward
ASYMMETRIC_BROKEN = {
    "token missing": ({"backward": (B0, B1._replace(slices=(Slice(0, 1, 8),)), B2)}, "missing in the backward pass"),
    "neither kept nor replayed": ({"replayed": (0,)}, "neither activations nor a replay"),
    "replay of nothing": ({"replayed": (0, 1, 3)}, "ascending order"),
    "ascending": ({"backward": (B1, B0, B2)}, "launched out of order"),
    "away": ({"backward": (B0._replace(ranks=(1,)), B1, B2)}, "away from its prefix"),
    "over the cap": (
        {"backward": (MicroBatch((Slice(0, 3, 12),), (0,)), MicroBatch((Slice(0, 0, 3),), (0,)), B2)},
        "over the token cap",
    ),
    "order ascends": ({"order": (ops("F0 F1 F2 B1 B0 B2"),)}, "prefix KV is freed"),
    "too early": ({"order": (ops("F0 F2 B0 F1 B1 B2"),)}, "before its forward has ended"),
    "kept too early": ({"order": (ops("F0 F1 B2 F2 B0 B1"),)}, "backward runs before forward"),
    "no order": ({"order": ()}, "leaves the order"),
    "recompute": ({"recompute": ((0, 0, 0),)}, "groups of its own"),
    "whole sequences": ({"limits": replace(LIMITS, num_stages=1, whole_sequences=True)}, "whole sequences only"),
}


@pytest.mark.parametrize("name", ASYMMETRIC_BROKEN)
def test_each_law_of_asymmetric_plans_refuses(name):
    changes, message = ASYMMETRIC_BROKEN[name]
    with pytest.raises(PlanError, match=message):
        check(replace(ASYMMETRIC, **changes))


def test_dummies_of_a_rank_keep_graphs_of_their_own():
    dummy = MicroBatch((), (0,))
    plan = replace(
        ASYMMETRIC,
        micro_batches=(*HALVES, dummy, dummy),
        backward=(dummy, *ASYMMETRIC.backward, dummy),
        replayed=(1, 2),
        order=(ops("F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"),),
    )
    assert check(plan).forward_of == (3, None, None, 2, 4)


def test_ranks_of_a_stage_need_no_common_order():
    """Nobody waits for a rank that is not in the micro-batch: stage 0 lists rank 0's passes first, stage 1 rank 1's."""
    check(replace(WHOLE, limits=LIMITS, order=(ops("F0 B0 F1 B1"), ops("F1 B1 F0 B0"))))


def test_links_between_stages_are_queues():
    order = ops("F0 F1 B0 B1"), ops("F1 F0 B0 B1")
    crossed = replace(WHOLE, micro_batches=alone([4, 4]), limits=LIMITS, order=order)
    with pytest.raises(PlanError, match="different orders"):
        check(crossed)


def test_memory_of_a_replayed_micro_batch_is_its_input_and_then_its_activations():
    """By hand: KV of 12 tokens, two replays that never meet, dKV of the 8 before the last slice."""
    memory = MemoryCost(
        activation_bytes_per_token=4 * 10.0, kv_bytes_per_token=4 * 1.0, kv_grad_bytes_per_token=4 * 2.0
    )
    limits = replace(LIMITS, num_stages=1, memory=memory)
    plan = replace(ASYMMETRIC, limits=limits)
    peak = 12 * 4 * 1 + 8 * 4 * 2 + 5 * 4 * 10 + 8 * 4 * 10
    assert peak_activation_bytes(plan, 0, 0) == (peak, Op("B", 1))


SHARED = (
    MicroBatch((Slice(0, 0, 8),), (0, 1), cp_comm="ring"),
    MicroBatch((Slice(1, 0, 4),), (1,)),
    MicroBatch((Slice(2, 0, 8),), (0, 1), cp_comm="ring"),
)
STUCK = StepPlan(as_lengths([8, 4, 8]), SHARED, LIMITS)


def test_ranks_that_would_wait_for_each_other_are_refused_before_any_of_them_runs():
    """1F1B counts each rank's own micro-batches: rank 0 wants F2 next, which rank 1 runs after B0, which rank 0 shares.

    Stage 0, two stages: rank 0 runs F0 F2 B0 B2 and rank 1 runs F0 F1 B0 F2 B1 B2.
    """
    with pytest.raises(PlanError, match="the order deadlocks") as caught:
        check(STUCK)
    assert "rank 0 of stage 0 waits at F2" in caught.value.found
    assert "rank 1 of stage 0 waits at B0" in caught.value.found


def test_the_same_work_runs_in_an_order_of_the_whole_plane():
    one_list = (ops("F0 F1 B0 F2 B1 B2"), ops("F0 B0 F1 B1 F2 B2"))
    check(replace(STUCK, order=one_list))
    check(replace(STUCK, limits=replace(LIMITS, num_stages=1)))  # F, B, F, B: every rank meets in launch order
    behind = (SHARED[0], SHARED[2], SHARED[1])
    check(replace(STUCK, micro_batches=behind))


def test_ranks_that_run_in_step_refuse_what_is_shared_out_of_step():
    """Equal counts: a dummy puts both ranks' shared micro-batches at one place, or at two."""
    dummy = MicroBatch((), (0,))
    in_step = replace(LIMITS, num_stages=1, all_in_step=True)
    check(replace(STUCK, micro_batches=(SHARED[0], dummy, *SHARED[1:]), limits=in_step))
    with pytest.raises(PlanError, match="runs all ranks in step"):
        check(replace(STUCK, micro_batches=(*SHARED, dummy), limits=in_step))
    # Launched in step, yet rank 0 runs the backward of its own one before the shared one's and rank 1 behind it.
    crossed = (SHARED[1]._replace(ranks=(0,)), MicroBatch((Slice(2, 0, 8),), (1,)), SHARED[0])
    crossed_order = replace(STUCK, micro_batches=crossed, limits=in_step, order=(ops("F0 F1 F2 B0 B2 B1"),))
    with pytest.raises(PlanError, match="runs all ranks in step"):
        check(crossed_order)
    check(replace(crossed_order, order=(ops("F0 F1 F2 B2 B0 B1"),)))


def test_ranks_that_run_in_step_run_passes_of_one_kind_at_a_time():
    """Every pass gathers weights from all ranks, forwards from the first layer on and backwards from the last."""
    in_step = replace(LIMITS, num_stages=1, all_in_step=True)
    plan = StepPlan(as_lengths([8] * 4), alone([8] * 4, (0, 1, 0, 1)), in_step, order=(ops("F0 F1 F2 F3 B0 B1 B2 B3"),))
    assert not check(plan).shared
    with pytest.raises(PlanError, match="differ in the order of their passes"):
        check(replace(plan, order=(ops("F0 F1 B0 F2 F3 B1 B2 B3"),)))


FOUR = replace(WHOLE.limits, num_ranks=4, in_step=4)
TWO_RANKS = (((2,), (0, 1)), ())


@pytest.mark.parametrize(
    ("policy", "limits", "broken"),
    [
        (ExpertPolicy("layout", 2, copies=(((4,), (0,), (), ()),)), FOUR, ""),
        (ExpertPolicy("layout", 2, copies=TWO_RANKS), FOUR, ""),  # two groups run in step
        (ExpertPolicy("layout", 2, node_ranks=2), FOUR, ""),
        (ExpertPolicy("clone", 2), WHOLE.limits, "do not run in step"),
        (ExpertPolicy("clone", 2, node_ranks=3), FOUR, "do not divide a group"),
        (ExpertPolicy("layout", 2, copies=(((2,), (0,), ()),)), FOUR, "not said by rank"),
        (ExpertPolicy("layout", 2, copies=(*TWO_RANKS, ((4,), (0,), (), ()))), FOUR, "not said by rank"),
        (ExpertPolicy("layout", 1, copies=TWO_RANKS), FOUR, "more copies of experts than slots"),
        (ExpertPolicy("layout", 2, copies=(((2, 2), ()),)), FOUR, "twice or out of order"),
        (ExpertPolicy("layout", 2, copies=(((), (1, 0)),)), FOUR, "twice or out of order"),
    ],
)
def test_a_policy_of_experts_fits_the_groups_that_run_in_step(policy, limits, broken):
    plan = replace(WHOLE, limits=limits, experts=policy)
    if broken:
        with pytest.raises(PlanError, match=broken):
            check_policy(plan)
    else:
        check_policy(plan)
