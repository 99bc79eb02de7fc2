"""Micro-batches that ranks share: in step without a cp_comm, exact on real DeepSpeed cp_comm types of 4 ranks."""

from __future__ import annotations

import pytest
from deepspeed_tests import shared_plans, slice_plans
from evenload.core.costs.costs import from_totals
from evenload.core.errors import EvenloadError
from evenload.core.plan.action import Action, in_step
from evenload.core.plan.program import lower
from evenload.core.plan.step_plan import MicroBatch, Op, Slice
from evenload.integrations.unmodified.exact_number import into_exactly
from harness.cases import only_full

MIXED = ("ring", "all_gather", "all_to_all", "hybrid")
ZONES = ("zones", "zones, all_gather, remap", "zones, all_to_all, remap, routed", "zones, routed")
CHAINS = ("chain", "chain, half replayed", "growth, all replayed", "regrouped beside shared")


def _rows(plan, *, equal):
    return [lower(plan, 0, rank, "in step" if equal else "idle") for rank in range(plan.limits.num_ranks)]


def _meets(heads):
    """Whether the ranks of every shared pass of a round are all at it."""
    return all(heads[rank][:2] == one[:2] for one in heads if one.is_shared for rank in one.micro_batch.ranks)


SLICED = (*slice_plans.HAND, *slice_plans.EQUAL, *map(str, range(50)))
SHARED = (*MIXED, *ZONES, *CHAINS, "crossed", *map(str, range(60)))


@pytest.mark.parametrize(
    ("plan_of", "names"), [(slice_plans.plan_of, SLICED), (shared_plans.plan_of, SHARED)], ids=["sliced", "shared"]
)
def test_no_rank_waits_in_a_ring_while_a_peer_waits_in_a_gather(plan_of, names):
    """In step all ranks meet in every round, and those of a shared micro-batch in the same one; nothing is lost."""
    for plan in map(plan_of, names):
        rows, free = _rows(plan, equal=True), _rows(plan, equal=False)
        assert len({tuple(one.kind == "backward" for one in row) for row in rows}) == 1
        assert all(_meets(heads) for heads in zip(*rows, strict=True))
        for row, alone in zip(rows, free, strict=True):
            real, wanted = ([one[:3] for one in actions if one.micro_batch.slices] for actions in (row, alone))
            assert real == wanted
            started = [one.graph for one in row if one.kind in ("forward", "recompute_forward")]
            ended = [one.graph for one in row if one.kind == "backward"]
            assert sorted(started) == sorted(ended) == sorted(set(ended))


def test_equal_counts_are_not_enough():
    """Ranks of equal counts and equal kinds of passes may still come to a shared one in different rounds."""
    free = _rows(shared_plans.plan_of("crossed"), equal=False)
    assert len({tuple(one.kind == "backward" for one in row) for row in free}) == 1
    assert not all(_meets(heads) for heads in zip(*free, strict=True))


def test_a_lawful_equal_plan_gets_no_dummies():
    sliced = slice_plans.plan_of("slices, in step")
    assert [len(row) for row in _rows(sliced, equal=True)] == [32, 32]
    for plan in (sliced, *map(shared_plans.plan_of, ("ring, in step", "hybrid, in step", "zones"))):
        rows, free = _rows(plan, equal=True), _rows(plan, equal=False)
        assert [[one[:4] for one in row] for row in rows] == [[one[:4] for one in row] for row in free]


def test_rows_that_wait_in_a_circle_are_refused():
    pair = [MicroBatch((Slice(i, 0, 8),), (0, 1), cp_comm="ring") for i in (0, 1)]
    first, second = (Action("forward", Op("F", i), pair[i], i) for i in (0, 1))
    with pytest.raises(EvenloadError, match="wait for each other"):
        in_step([(first, second), (second, first)])


def test_a_shared_forward_runs_whole_for_its_replay():
    plan = shared_plans.plan_of("chain, all replayed")
    ran = [one for row in _rows(plan, equal=False) for one in row if one.kind == "forward_kv" and one.is_shared]
    assert ran
    assert {one.micro_batch for one in ran} <= set(plan.micro_batches)


def test_loops_of_ones_own_refuse_shared_micro_batches():
    with pytest.raises(EvenloadError, match="every micro-batch on one rank"):
        into_exactly(shared_plans.plan_of("ring"), 8, from_totals("test", token_s=1.0, square_s=0.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "recompute", "names"),
    [
        only_full(0, False, (*MIXED[:2], ZONES[0], CHAINS[1], "shared 0", "shared 1")),
        (1, True, (MIXED[1], ZONES[1], CHAINS[2], "shared 3")),
        (2, False, (MIXED[2], MIXED[3], ZONES[2], CHAINS[3], "ring, offloaded", "shared 4")),
        only_full(3, False, (MIXED[3], "ring, in step", ZONES[0], "crossed", ZONES[3], "shared 6")),
        only_full(3, True, (CHAINS[1], "shared 8")),
        (3, True, (MIXED[0], "shared 5")),
    ],
)
def test_gradients_are_those_of_plain_training(exactness, stage, recompute, names):
    results = exactness(4, stage=stage, names=list(names), recompute=recompute)
    assert [result["gathered"] for result in results] == [0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, only_full(3)])
def test_planted_faults_are_caught(unnoticed, stage):
    faults = ("lost keys", "lost gradients of keys", "wrong place")
    assert unnoticed(4, faults, stage=stage, names=["chain"]) == []
