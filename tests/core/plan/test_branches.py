"""A plan names the branches of the runtime that it takes; the settings of a recipe name those that plans may take."""

from dataclasses import replace

import pytest
from evenload.core.laws import check
from evenload.core.plan import branches
from evenload.core.plan.branches import branches_of
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.training.proof.reach import MOST_BATCHES, choose, opened, planned, without_dummies

from ..by_hand import chain_of, ops

LIMITS = Limits(num_ranks=3, max_tokens=16, num_stages=2, layers_per_stage=4)
PLAN = StepPlan(
    as_lengths([12, 5, 3]),
    (
        MicroBatch((Slice(0, 0, 7), Slice(1, 0, 5)), (0,)),
        MicroBatch((Slice(0, 7, 12),), (0,)),
        MicroBatch((Slice(2, 0, 3),), (1,)),
        MicroBatch((), (2,)),
    ),
    LIMITS,
)


def test_what_a_plan_takes_is_counted():
    assert branches_of(PLAN) == {
        branches.PACKED: 1,
        branches.CUT: 1,
        branches.IDLE_RANKS: 1,
        branches.UNEQUAL_COUNTS: 1,
        branches.DUMMIES: 1,
        branches.PADDED: 1,
    }


@pytest.mark.parametrize(
    ("changes", "name", "count"),
    [
        ({"replayed": (0,)}, branches.REPLAYED, 1),
        ({"backward": PLAN.micro_batches[:2]}, branches.REGROUPED, 2),
        ({"recompute": ((1, 0, 2, 0), (0, 0, 1, 0))}, branches.RECOMPUTED, 4),
        ({"order": (ops("F0 B0 W0"), ops("F0 B0"))}, branches.WEIGHT_PASSES, 1),
        ({"order": (ops("F0 B0"), ops("F0 B0"))}, branches.OWN_ORDER, 2),
        ({"offload": (0.5, 0.0, 0.0, 0.0)}, branches.OFFLOADED, 1),
    ],
)
def test_every_way_to_run_a_plan_has_a_name(changes, name, count):
    assert branches_of(replace(PLAN, **changes))[name] == count


def test_shared_micro_batches_are_counted_by_how_they_share():
    shared = MicroBatch((Slice(0, 0, 12), Slice(1, 0, 5)), (0, 1), 0, "ring", cp_groups=((0, 1), (1, 0)), remap=True)
    gathered = MicroBatch((Slice(2, 0, 3),), (1, 2), 0, "all_gather", routed=True)
    taken = branches_of(replace(PLAN, micro_batches=(shared, gathered)))
    for name in (branches.sharing("ring"), branches.sharing("all_gather"), branches.SEVERAL_GROUPS, branches.REMAPPED):
        assert taken[name] == 1
    assert taken[branches.ROUTED] == 1


def chain(**plugins):
    return chain_of(plugins, parallel={"dp": 4}, train={"recompute": True, "global_batch_size": 8})


def test_settings_open_branches_and_say_what_prefers_them():
    both = chain(packing={"max_tokens": 64}, mesh={"engines": ["ring", "all_gather"], "remap": "off"})
    names = set(opened(both))
    assert {branches.PACKED, branches.CUT, branches.REGROUPED, branches.IDLE_RANKS, branches.SEVERAL_GROUPS} <= names
    assert {branches.sharing("ring"), branches.sharing("all_gather")} <= names
    assert not {branches.REMAPPED, branches.sharing("hybrid"), branches.WEIGHT_PASSES} & names
    preferring = dict(zip(("packing", "mesh"), opened(both)[branches.sharing("ring")].links, strict=True))
    assert preferring["mesh"][1].engines == ("ring",)
    least = {branches.PACKED, branches.IDLE_RANKS, branches.RANKS_WITHOUT_PASS}
    assert set(opened(chain(packing={"slices": "off"}))) == least


def test_dummies_are_left_out_of_everything_that_counts_them():
    work = [MicroBatch((Slice(0, 0, 12),), (0,)), MicroBatch((Slice(1, 0, 5), Slice(2, 0, 3)), (1,))]
    dummy = MicroBatch((), (2,))
    limits = replace(LIMITS, splits_backward=True)
    lists = "F0 F1 F2 B0 W0 B1 B2 W2", "F0 B0 F1 B1 F2 B2"
    plan = StepPlan(PLAN.lengths, (work[0], dummy, work[1]), limits, tuple(map(ops, lists)), ((1, 2, 3), (0, 0, 4)))
    bare = check(without_dummies(check(plan)))
    assert bare.micro_batches == tuple(work)
    assert bare.order == (ops("F0 F1 B0 W0 B1 W1"), ops("F0 B0 F1 B1"))
    assert bare.recompute == ((1, 3), (0, 4))
    assert branches_of(bare)[branches.RANKS_WITHOUT_PASS] == 1


def test_batches_are_chosen_that_take_what_is_missing():
    import numpy as np

    one = chain(packing={"max_tokens": 64, "slices": "auto"})
    lengths = np.array([30 + 17 * k % 90 for k in range(50)], dtype=np.int64)
    missing = {branches.IDLE_RANKS, branches.RANKS_WITHOUT_PASS, branches.PACKED, branches.REGROUPED}
    chosen = choose(one, missing, lengths, 8, seed=1)
    assert 1 <= len(chosen) <= MOST_BATCHES
    assert frozenset().union(*(batch.takes for batch in chosen)) == missing
    for batch in chosen:
        plan = planned(one, lengths[batch.samples], batch.prefers)
        assert batch.takes <= branches_of(plan).keys()
    assert choose(one, {branches.WEIGHT_PASSES}, lengths, 8, seed=1) == []
