"""Micro-batches that ranks share: in step without a cp_comm, exact on real DeepSpeed cp_comm types of 4 ranks."""

from __future__ import annotations

import pytest
from evenload.core.costs.costs import from_totals
from evenload.core.errors import EvenloadError
from evenload.core.plan.action import Action, in_step
from evenload.core.plan.program import lower
from evenload.core.plan.step_plan import MicroBatch, Op, Slice
from evenload.integrations.deepspeed.unmodified.micro_batches import into_exactly
from harness.cases import only_full
from harness.proof import LENGTHS, ROUNDING, caught, exact
from harness.proof.by_hand import by_hand
from harness.proof.drawn import random_shared_plan

MIXED = ("ring", "all_gather", "all_to_all", "hybrid")
ZONES = ("zones", "zones, all_gather, remap", "zones, all_to_all, remap, routed", "zones, routed")
CHAINS = ("chain", "chain, half replayed", "growth, all replayed", "regrouped beside shared")
HEADS = {"num_ranks": 4, "num_stages": 1, "layers_per_stage": 2, "heads": 4}


def _plan(name):
    if name.isdigit():
        return random_shared_plan(int(name), LENGTHS, recompute=False, **HEADS)
    return by_hand(name, node_ranks=2, **HEADS)


def _rows(plan, *, equal):
    return [lower(plan, 0, rank, "in step" if equal else "idle") for rank in range(4)]


def _meets(heads):
    """Whether the ranks of every shared pass of a round are all at it."""
    return all(heads[rank][:2] == one[:2] for one in heads if one.is_shared for rank in one.micro_batch.ranks)


@pytest.mark.parametrize("name", [*MIXED, *ZONES, *CHAINS, "crossed", *map(str, range(60))])
def test_no_rank_waits_in_a_ring_while_a_peer_waits_in_a_gather(name):
    """In step all ranks meet in every round, and those of a shared micro-batch in the same one; nothing is lost."""
    plan = _plan(name)
    rows, free = _rows(plan, equal=True), _rows(plan, equal=False)
    assert len({tuple(one.kind == "backward" for one in row) for row in rows}) == 1
    assert all(_meets(heads) for heads in zip(*rows, strict=True))
    for row, alone in zip(rows, free, strict=True):
        assert [one[:3] for one in row if one.micro_batch.slices] == [
            one[:3] for one in alone if one.micro_batch.slices
        ]
        started = [one.graph for one in row if one.kind in ("forward", "recompute_forward")]
        ended = [one.graph for one in row if one.kind == "backward"]
        assert sorted(started) == sorted(ended) == sorted(set(ended))


def test_equal_counts_are_not_enough():
    """Ranks of equal counts and equal kinds of passes may still come to a shared one in different rounds."""
    free = _rows(_plan("crossed"), equal=False)
    assert len({tuple(one.kind == "backward" for one in row) for row in free}) == 1
    assert not all(_meets(heads) for heads in zip(*free, strict=True))


def test_a_lawful_equal_plan_gets_no_dummies():
    for name in ("ring, in step", "hybrid, in step", "zones"):
        plan = _plan(name)
        rows, free = _rows(plan, equal=True), _rows(plan, equal=False)
        assert [[one[:4] for one in row] for row in rows] == [[one[:4] for one in row] for row in free]


def test_rows_that_wait_in_a_circle_are_refused():
    pair = [MicroBatch((Slice(i, 0, 8),), (0, 1), cp_comm="ring") for i in (0, 1)]
    first, second = (Action("forward", Op("F", i), pair[i], i) for i in (0, 1))
    with pytest.raises(EvenloadError, match="wait for each other"):
        in_step([(first, second), (second, first)])


def test_a_shared_forward_runs_whole_for_its_replay():
    plan = _plan("chain, all replayed")
    for row in _rows(plan, equal=False):
        ran = [one.micro_batch for one in row if one.kind == "forward_kv" and one.is_shared]
        assert set(ran) <= set(plan.micro_batches)
    assert any(one.kind == "forward_kv" and one.is_shared for row in _rows(plan, equal=False) for one in row)


def test_loops_of_ones_own_refuse_shared_micro_batches():
    with pytest.raises(EvenloadError, match="every micro-batch on one rank"):
        into_exactly(_plan("ring"), 8, from_totals("test", token_s=1.0, square_s=0.0))


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
def test_gradients_are_those_of_plain_training(on_ranks, stage, recompute, names):
    results = on_ranks(4, "exactness", stage=stage, names=list(names), recompute=recompute)
    exact([result["found"][0] for result in results], ROUNDING)
    assert [result["gathered"] for result in results] == [0] * 4


FAULTS = ("lost keys", "lost gradients of keys", "wrong place")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, only_full(3)])
def test_planted_faults_are_caught(on_ranks, stage):
    results = on_ranks(4, "exactness", stage=stage, names=["chain"], faults=["", *FAULTS, ""])
    sound, *broken, again = ([result["found"][i] for result in results] for i in range(5))
    exact(sound, ROUNDING)
    exact(again, ROUNDING)
    assert [name for name, found in zip(FAULTS, broken, strict=True) if not caught(found)] == []
