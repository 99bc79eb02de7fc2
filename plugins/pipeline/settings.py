"""Which settings a plan of somebody else does not keep, which caps are too small, and which branches they open."""

from __future__ import annotations

from collections import Counter

from ...core.costs.context import PlanningContext
from ...core.errors import EvenloadError
from ...core.plan.branches import CUT, RECOMPUTED, WEIGHT_PASSES
from ...core.plan.limits import Limits
from ...core.plan.step_plan import StepPlan
from .config import PipelineConfig


def limits_for(plan: StepPlan, config: PipelineConfig) -> Limits:
    """The limits with this section's caps. Raises EvenloadError where a micro-batch would hold less than one block."""
    limits = config.capped(plan.limits)
    if limits.max_tokens < config.block_tokens:
        raise EvenloadError(
            "a micro-batch of the pipeline is smaller than one block",
            f"max_tokens {limits.max_tokens} (the least of all plugins'), block_tokens {config.block_tokens}",
            "raise max_tokens, or lower plugins.pipeline.block_tokens",
        )
    return limits


def refuse_ranks_in_step(limits: Limits) -> None:
    """Raise EvenloadError where every rank must run equally many micro-batches: none are made here for that."""
    if limits.all_in_step:
        raise EvenloadError(
            "plugins.pipeline cannot plan for a trainer whose ranks run in lockstep",
            "every rank needs equally many micro-batches",
            "enable plugins.packing, which makes them equal, or disable plugins.pipeline",
        )


def breaks(plan: StepPlan, config: PipelineConfig) -> str:
    """The first setting that a plan does not keep, with what it does instead; empty where it keeps all."""
    slices = [s for m in plan.micro_batches for s in m.slices]
    odd = next((s.start for s in slices if s.start % config.block_tokens), 0)
    lengths, block = plan.lengths.tolist(), config.block_tokens
    chunk = max(1, plan.limits.max_tokens // block * block)
    counts = Counter(s.sequence for s in slices)
    many = max((n for i, n in counts.items() if n > max(config.chunks, -(-lengths[i] // chunk))), default=0)
    rules = (
        (many, f"chunks is {config.chunks}, a sequence is in {many}"),
        (odd, f"block_tokens is {block}, a slice starts at {odd}"),
        (config.recompute == "off" and any(map(any, plan.recompute)), "recompute is off, layers are recomputed"),
        (config.split_backward == "off" and any(plan.split), "split_backward is off, weight gradients run apart"),
    )
    return next((f"plugins.pipeline.{words}" for broken, words in rules if broken), "")


def branches(config: PipelineConfig, context: PlanningContext) -> dict[str, PipelineConfig]:
    """For each branch that plans may take, settings under the same caps with which they most likely do."""
    opened = {CUT: config} if config.chunks > 1 and context.layout.pp > 1 else {}
    if config.recompute == "auto":
        opened[RECOMPUTED] = config
    if config.split_backward != "off" and context.layout.pp > 1:
        opened[WEIGHT_PASSES] = config
    return opened
