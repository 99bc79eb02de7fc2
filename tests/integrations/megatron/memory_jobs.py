"""What ranks hold, measured and predicted; see jobs.py."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

from evenload.core.costs.memory import fixed_bytes
from evenload.core.laws import check
from evenload.core.plan.limits import MemoryCost
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import Setting, context_of, costs_of, limits_of, stage_costs
from evenload.core.simulate.step import simulate
from evenload.runtime.measure.memory import Levels, live_bytes
from evenload.runtime.watchdog.watchdog import Watchdog
from evenload.training.job import Job
from evenload.training.profiling.memory import measure_memory, random_tokens
from megatron_tests.jobs import hosted

HELD = [[700, 200], [350, 150, 100], [500]]
"""Sequences of each micro-batch of a rank."""
SIZED = {"model__hidden_size": 128, "data__max_length": 1024, "train__dtype": "fp32", "model__vocab_size": 512}


def measured_memory(world: Any, **changes: Any) -> dict[str, Any]:
    """The memory part of a profile."""
    with hosted(world, **SIZED, **changes) as host, Watchdog() as watchdog:
        recipe, source = host.recipe, None
        job = Job(recipe, world, host, PlanChain.of_recipe(recipe, host.layout), watchdog, source)
        return measure_memory(job, 2048).model_dump()


def peaks(world: Any, *, memory: dict[str, Any], **changes: Any) -> dict[str, float]:
    """The peak of a step on this rank [bytes], all in all: as these memory costs predict it, and as it is."""
    of_others = live_bytes(world.device)  # references that earlier cases of this world keep
    with hosted(world, **SIZED, **changes) as host:
        recipe, layout = host.recipe, host.layout
        setting = Setting.of_recipe(recipe)
        counted = context_of(setting, layout)
        costs = costs_of(setting, counted.cluster).model_copy(update={"memory": MemoryCost(**memory)})
        context = replace(counted, costs=stage_costs(setting, costs, layout))
        plan = _plan(replace(limits_of(setting, context), max_tokens=2048))
        tokens_of = random_tokens(recipe)
        host.train_step(plan, tokens_of, lr=0.0)
        gc.collect()
        fixed = live_bytes(world.device)
        with Levels(world.device) as levels:
            host.train_step(plan, tokens_of, lr=0.0)
        peak = float(levels.read()[1])
        outcome, own = simulate(plan, context, record=False), (host.pipeline_stage, host.dp_cp_rank)
        held = fixed_bytes(context.costs.memory, plan.limits)
        return {
            "peak": float(outcome.peak_bytes[own]),
            "measured": fixed - of_others + peak,
            "activations": float(outcome.peak_bytes[own]) - held,
            "activations_measured": peak,
        }


def _plan(limits: Any) -> StepPlan:
    lengths = [n for _ in range(limits.num_ranks) for pack in HELD for n in pack]
    micro_batches, first = [], 0
    for rank in range(limits.num_ranks):
        for pack in HELD:
            slices = tuple(Slice(first + i, 0, n) for i, n in enumerate(pack))
            micro_batches.append(MicroBatch(slices, (rank,)))
            first += len(pack)
    return check(StepPlan(as_lengths(lengths), tuple(micro_batches), limits, made_by="test"))
