"""Replays under a cap on memory: as few as it needs, none without a cap, and a refusal that says what is missing."""

from dataclasses import replace

from evenload.core.costs.memory import peaks_of_stage
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.step_plan import Slice, StepPlan, as_lengths
from evenload.plugins.packing import replay
from evenload.plugins.packing.assemble import assemble, chains_of_rank
from evenload.plugins.packing.replay import fit_memory

MEMORY = MemoryCost(activation_bytes_per_token=10.0, kv_bytes_per_token=1.0, kv_grad_bytes_per_token=1.0)
LIMITS = Limits(1, 100, memory=MEMORY)


def chain_of(count):
    """One sequence in so many slices of 100 tokens."""
    packs = [[Slice(0, 100 * k, 100 * (k + 1))] for k in range(count)]
    return assemble(StepPlan(as_lengths([100 * count]), (), LIMITS), LIMITS, [packs])


def peak(plan):
    return max(peak for peak, _ in peaks_of_stage(plan, 0))


def capped(plan, cap):
    return replace(plan, limits=replace(plan.limits, max_activation_bytes=cap))


def test_without_a_cap_nothing_is_replayed():
    plan = chain_of(4)
    assert fit_memory(plan) is plan
    assert chains_of_rank(plan, 0) == [[0, 1, 2, 3]]


def test_one_more_kept_micro_batch_would_be_over_the_cap():
    plan = chain_of(6)
    caps = [peak(plan.revised(replayed=tuple(range(early)))) for early in range(6)]
    assert caps == sorted(caps, reverse=True)
    for early, cap in enumerate(caps):
        fitted = fit_memory(capped(plan, cap))
        assert peak(fitted) <= cap
        least = next(n for n, held in enumerate(caps) if held <= cap)
        assert fitted.replayed == tuple(range(least)), early


def test_a_large_plan_fits_after_few_tries(monkeypatch):
    monkeypatch.setattr(replay, "_WALKED", 1)
    plan = chain_of(8)
    cap = peak(plan.revised(replayed=(0, 1)))
    assert peak(fit_memory(capped(plan, cap))) <= cap
