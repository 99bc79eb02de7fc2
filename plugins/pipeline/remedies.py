"""What would fit where a batch does not: settings that were tried on it, not guessed.

For each setting the mildest change that works, with every layer recomputed and chunks in elastic order. Memory of more
stages is that of the same plane of ranks with as many times the devices: each holds a part of the layers and of what
belongs to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from ...core.costs.context import PlanningContext
from ...core.costs.memory import activation_budget_bytes
from ...core.errors import EvenloadError
from ...core.input.format import GIB
from ...core.machine.layout import Layout
from ...core.plan.limits import Limits
from ...core.plan.step_plan import StepPlan
from ...core.simulate.v_shape import merged
from .checkpointing import DoesNotFitError
from .chunks import chunkings
from .config import PipelineConfig
from .elastic import ordered
from .memory_rows import Probes, fullest

_TIMES = (2, 4, 8, 16)
_CHUNKINGS = 6
"""Of each setting, the most promising ones."""


def refused(
    problem: DoesNotFitError, incoming: StepPlan, context: PlanningContext, config: PipelineConfig
) -> DoesNotFitError:
    """The refusal of a batch with what would fit instead of what might."""
    remedies = list(_remedies(incoming, context, config))
    if problem.enough_gib:
        alone = problem.enough_gib * GIB <= incoming.limits.max_activation_bytes
        name = "plugins.pipeline.activation_gib" if alone else "activation_gib of every plugin"
        remedies.insert(0, f"{name} raised to {problem.enough_gib:g}")
    if not remedies:
        return problem
    do = "this batch would fit with any of: " + "; ".join(remedies)
    return DoesNotFitError(problem.most, problem.missing_bytes, problem.found, do, problem.enough_gib)


def _remedies(incoming: StepPlan, context: PlanningContext, config: PipelineConfig) -> Iterator[str]:
    limits = config.capped(incoming.limits)

    def fits_with(tokens: int) -> bool:
        cap = min(tokens, incoming.limits.max_tokens)  # another plugin's own cap holds as well
        changes = cap != limits.max_tokens
        return changes and _fits(incoming, replace(limits, max_tokens=cap), context, config)

    fewer = [times for times in _TIMES if config.max_tokens // times >= config.block_tokens]
    lowered = (n for n in fewer if fits_with(config.max_tokens // n))
    raised = (n for n in _TIMES if fits_with(config.max_tokens * n))
    # More tokens leave sequences whole, whose K and V need not be kept.
    if n := next(lowered, 0):
        yield f"plugins.pipeline.max_tokens lowered to 1/{n} of it"
    elif n := next(raised, 0):
        yield f"plugins.pipeline.max_tokens raised to {n} times"
    whole = (n for n in _TIMES if not (limits.layers or limits.layers_per_stage % n))
    if n := next((n for n in whole if _fits(incoming, *_deeper(limits, context, n), config)), 0):
        yield f"parallel.pp={limits.num_stages * n} on {n} times as many devices"
    shorter = (incoming.lengths.clip(max=n) for times in _TIMES if (n := int(incoming.lengths.max(initial=0)) // times))
    fitting = (rows for rows in shorter if _fits(incoming.revised(lengths=rows), limits, context, config))
    yield from (f"data.max_length={rows.max()}" for rows in islice(fitting, 1))


def _fits(incoming: StepPlan, limits: Limits, context: PlanningContext, config: PipelineConfig) -> bool:
    budget_bytes = activation_budget_bytes(context.cluster, context.costs.memory, limits)
    batch = StepPlan(incoming.lengths, (), limits)
    with suppress(EvenloadError):  # a sequence that is longer than a micro-batch, and may not be cut
        for chunked in islice(chunkings(batch, limits, context, config), _CHUNKINGS):
            plan = merged(ordered(chunked, context))
            if fullest(plan, Probes(plan).levels(limits.layers_per_stage)).held_bytes <= budget_bytes:
                return True
    return False


def _deeper(limits: Limits, context: PlanningContext, times: int) -> tuple[Limits, PlanningContext]:
    split = Layout(pp=times)
    stages, layers = limits.num_stages * times, limits.layers_per_stage // times
    deeper = replace(limits, num_stages=stages, layers_per_stage=layers, memory=limits.memory.of_stage(split))
    layout = replace(context.layout, pp=context.layout.pp * times)
    return deeper, replace(context, costs=context.costs.of_stage(split), layout=layout)
