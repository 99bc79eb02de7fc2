"""Plans that share samples in a user's loop: losses of all ranks in rounds, and samples where they are computed."""

from __future__ import annotations

from evenload.core.laws import check
from evenload.core.plan.program import lower
from evenload.core.plan.token_layout import layout_of, ranks_of_samples
from evenload.integrations.megatron.unmodified.planning.sharing import meeting
from harness.proof import LENGTHS, random_shared_plan

WHOLE = {"pieces": (1,), "replay": "none", "asymmetric": False}


def drawn(seed, stages=1, **how):
    sizes = {"num_ranks": 4, "num_stages": stages, "layers_per_stage": 2, "heads": 4}
    return random_shared_plan(seed, LENGTHS, **sizes, **how)


def losses_before_shared_passes(plan):
    """For each shared pass how many losses each of its ranks has had, at the last stage."""
    met = {}
    for rank in range(plan.limits.num_ranks):
        losses = 0
        for action in lower(plan, plan.limits.num_stages - 1, rank):
            if action.computes and action.is_shared:
                met.setdefault((action.kind, action.op), set()).add(losses)
            losses += action.kind in ("forward", "recompute_forward")
        met.setdefault("all", set()).add(losses)
    return met


class PlannedAgainError(Exception):
    """A plan was asked for under other limits."""


def again():
    raise PlannedAgainError


def test_the_losses_of_all_ranks_are_in_rounds():
    kept, asked = 0, 0
    for plan in [drawn(seed, **how) for how in (WHOLE, {}) for seed in range(12)]:
        try:
            result = meeting(plan, again)
        except PlannedAgainError:
            assert plan.order, "dummies bring whatever has no order into rounds"
            asked += 1
            continue
        check(result)
        if not plan.shared:
            assert result is plan
            continue
        kept += 1
        assert all(len(losses) == 1 for losses in losses_before_shared_passes(result).values())
        assert sorted(m for m in result.micro_batches if m.slices) == sorted(m for m in plan.micro_batches if m.slices)
        if plan.recompute and not plan.order:
            rows = dict(zip(result.micro_batches, zip(*result.recompute, strict=True), strict=True))
            wanted = zip(plan.micro_batches, zip(*plan.recompute, strict=True), strict=True)
            assert all(rows[micro_batch] == row for micro_batch, row in wanted)
    assert kept > 4
    assert asked > 2


def test_each_sample_goes_to_the_ranks_that_have_tokens_of_it():
    for plan in map(drawn, range(12)):
        wanted = [set() for _ in LENGTHS]
        for micro_batch in (*plan.micro_batches, *plan.backward):
            for rank, pieces in layout_of(micro_batch, plan.limits.node_ranks).items():
                for piece in pieces:
                    wanted[piece.sequence].add(rank)
        assert ranks_of_samples(plan) == wanted
