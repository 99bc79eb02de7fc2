"""Micro-batches that ranks share: in step without a cp_comm, exact on real DeepSpeed cp_comm types of 4 ranks."""

from __future__ import annotations

import pytest
from evenload.core.costs.costs import from_totals
from evenload.core.errors import EvenloadError
from evenload.core.plan.action import Action, in_step
from evenload.core.plan.program import lower
from evenload.core.plan.step_plan import Op
from evenload.integrations.deepspeed.unmodified.micro_batches import into_exactly

ROUNDING = 2e-6
MIXED = ("mixed ring", "mixed all_gather", "mixed all_to_all", "mixed hybrid")
HOMES = ("cp_groups ring", "cp_groups all_gather remap", "cp_groups all_to_all remap routed", "cp_groups ring routed")
CHAINS = ("chains none", "chains some", "chains all", "regrouped")


def _rows(plan, *, equal):
    return [lower(plan, 0, rank, "in step" if equal else "idle") for rank in range(4)]


def _meets(heads):
    """Whether the ranks of every shared pass of a round are all at it."""
    return all(heads[rank][:2] == one[:2] for one in heads if one.is_shared for rank in one.micro_batch.ranks)


@pytest.mark.parametrize("name", [*MIXED, *HOMES, *CHAINS, "crossed", *(f"random {seed}" for seed in range(60))])
def test_no_rank_waits_in_a_ring_while_a_peer_waits_in_a_gather(shared_plans, name):
    """In step all ranks meet in every round, and those of a shared micro-batch in the same one; nothing is lost."""
    plan = shared_plans.named(name)
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


def test_equal_counts_are_not_enough(shared_plans):
    """Ranks of equal counts and equal kinds of passes may still come to a shared one in different rounds."""
    free = _rows(shared_plans.crossed(), equal=False)
    assert len({tuple(one.kind == "backward" for one in row) for row in free}) == 1
    assert not all(_meets(heads) for heads in zip(*free, strict=True))


def test_a_lawful_equal_plan_gets_no_dummies(shared_plans):
    for name in ("mixed ring equal", "mixed hybrid equal", "cp_groups ring"):
        plan = shared_plans.named(name)
        assert [[one[:4] for one in row] for row in _rows(plan, equal=True)] == [
            [one[:4] for one in row] for row in _rows(plan, equal=False)
        ]


def test_rows_that_wait_in_a_circle_are_refused(shared_plans):
    first, second = (Action("forward", Op("F", i), shared_plans.shared((i,), (0, 1), "ring"), i) for i in (0, 1))
    with pytest.raises(EvenloadError, match="wait for each other"):
        in_step([(first, second), (second, first)])


def test_a_shared_forward_runs_whole_for_its_replay(shared_plans):
    plan = shared_plans.chains("all")
    for row in _rows(plan, equal=False):
        ran = [one.micro_batch for one in row if one.kind == "forward_kv" and one.is_shared]
        assert ran
        assert set(ran) <= set(plan.micro_batches)


def test_loops_of_ones_own_refuse_shared_micro_batches(shared_plans):
    with pytest.raises(EvenloadError, match="every micro-batch on one rank"):
        into_exactly(shared_plans.mixed(), 8, from_totals("test", token_s=1.0, square_s=0.0))


def test_random_plans_are_of_every_kind(shared_plans):
    groups = [m for seed in range(60) for m in shared_plans.random_plan(seed).micro_batches]
    assert {len(m.ranks) for m in groups} == {1, 2, 3, 4}
    assert {m.cp_comm for m in groups} == {"", "ring", "all_gather", "all_to_all", "hybrid"}
    assert any(s.start and len(m.ranks) == 3 for m in groups for s in m.slices)
    assert any(m.cp_groups for m in groups)
    assert any(m.remap for m in groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "recompute", "names"),
    [
        (0, False, (*MIXED[:2], *HOMES[:1], CHAINS[1], "random 0", "random 1")),
        (1, True, (*MIXED[1:3], *HOMES[1:2], CHAINS[2], "random 2", "random 3")),
        (2, False, (*MIXED[2:], *HOMES[2:], CHAINS[3], "offloaded", "random 4", "random 5")),
        (3, False, (MIXED[3], "mixed ring equal", HOMES[0], "crossed", "random 6")),
        (3, True, (*MIXED[:3], HOMES[1], CHAINS[1], "random 8")),
    ],
)
def test_gradients_are_those_of_plain_training(on_ranks, shared_plans, stage, recompute, names):
    results = on_ranks(4, "rank_shared.exactness", stage=stage, names=list(names), recompute=recompute)
    for name in names:
        for result in results:
            assert result[name]["grad"] <= ROUNDING, name
            assert result[name]["loss"] <= ROUNDING, name
            assert result[name]["gathered"] == 0, name
        ran = sorted(piece for result in results for piece in result[name]["executed"])
        tokens = [(sequence, at) for sequence, first, stop in ran for at in range(first, stop)]
        wanted = [(s.index, at) for s in shared_plans.named(name).sequences for at in range(s.length)]
        assert sorted(tokens) == wanted, name


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "recompute"), [(1, False), (3, True)])
def test_bf16_within_its_rounding(on_ranks, stage, recompute):
    names = [MIXED[0], MIXED[3], CHAINS[1]]
    for result in on_ranks(4, "rank_shared.exactness", stage=stage, names=names, recompute=recompute, dtype="bf16"):
        for name in names:
            assert result[name]["grad"] <= 3e-2, name
            assert result[name]["loss"] <= 1e-2, name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_mutants_are_caught(on_ranks, stage):
    for found in on_ranks(4, "rank_shared.mutants", stage=stage):
        sound = {name: errors for name, errors in found.items() if name.startswith("sound")}
        assert len(sound) == 2
        assert all(max(errors) <= ROUNDING for errors in sound.values()), sound
        broken = {name: errors for name, errors in found.items() if name not in sound}
        assert len(broken) == 3
        assert all(max(errors) > 1e-3 for errors in broken.values()), broken
