"""Plan from a file of lengths alone, on any machine, and say what it gains. All times are predicted."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.chain import PlanChain
from ..core.errors import EvenloadError
from ..core.memory import peaks_of_stage
from ..core.predict import micro_batch_imbalance, predict
from ..core.recipe import Recipe
from ..core.workload import Sequence, StepPlan, sequences
from ..data.cut import cut
from ..data.lengths import read_lengths
from ..data.order import SampleOrder
from .drawing import Drawing

_DIFFERENCING_LIMIT = 1 << 22
"""Largest sequences x ranks for which Karmarkar-Karp is tried: it holds a list of that size."""


def plan(recipe: Recipe, lengths: Path, steps: int, out: Path | None = None) -> dict[str, Any]:
    """Plan ``steps`` global batches drawn from a lengths file as training would draw them. Raises EvenloadError."""
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    samples = cut(
        read_lengths(lengths), recipe.data.max_length, recipe.data.long_samples, recipe.data.min_length
    ).length
    size = recipe.train.global_batch_size
    if len(samples) < size:
        raise EvenloadError(
            "the lengths file holds fewer samples than one global batch",
            f"{len(samples)} samples, train.global_batch_size {size}",
            "lower train.global_batch_size",
        )
    drawing = Drawing(SampleOrder(len(samples), recipe.train.seed), samples, size, chain)
    rows, plans = [], []
    for step in range(steps):
        draw = drawing()
        batch = sequences(draw.lengths)
        start = time.perf_counter()
        step_plan = chain.plan(batch)
        plan_s = time.perf_counter() - start
        judged = _judge(step_plan, chain)
        memory = {"peak_activation_bytes": _peak_bytes(step_plan), "delay_steps": draw.delay_steps}
        rows.append({"step": step, "plan_s": plan_s, **judged, **memory, "baselines": _baselines(chain, batch)})
        plans.append(step_plan)
    if out is not None:
        _write(out, plans)
    return {
        "predicted": True,
        "costs": chain.situation.costs.source,
        "layout": vars(recipe.layout()),
        "plugins": [p.name for p in recipe.enabled()],
        "samples": len(samples),
        "steps": rows,
    }


def _judge(step_plan: StepPlan, chain: PlanChain) -> dict[str, Any]:
    predicted = predict(step_plan, chain.situation.costs)
    return {
        "step_s": predicted.step_s,
        "bound_s": step_plan.bound_s or sum(predicted.busy_s) / len(predicted.busy_s),
        "imbalance": predicted.imbalance,
        "padding_frac": step_plan.padding_frac,
        "bubble_frac": predicted.bubble_frac,
        "micro_batch_imbalance": _imbalance(step_plan, chain),
        "micro_batches": len(step_plan.micro_batches),
        "tokens": step_plan.num_tokens,
        "notes": [*step_plan.notes, *_bound_note(step_plan, chain)],
    }


def _bound_note(step_plan: StepPlan, chain: PlanChain) -> list[str]:
    """Say so when one sequence alone bounds the step."""
    seconds = chain.situation.costs.sequence_s(np.array([s.length for s in step_plan.sequences]))
    longest, mean = float(seconds.max()), float(seconds.sum()) / chain.limits.num_ranks
    if longest <= mean:
        return []
    tokens = step_plan.sequences[int(seconds.argmax())].length
    return [f"one sequence of {tokens} tokens costs {longest / mean:.2f}x a rank's mean share and bounds the step"]


def _baselines(chain: PlanChain, batch: tuple[Sequence, ...]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in chain.baseline_names:
        if name == "karmarkar_karp" and len(batch) * chain.limits.num_ranks > _DIFFERENCING_LIMIT:
            continue
        step_plan = replace(chain, instead=name).plan(batch)
        predicted = predict(step_plan, chain.situation.costs)
        out[name] = {
            "step_s": predicted.step_s,
            "imbalance": predicted.imbalance,
            "micro_batch_imbalance": _imbalance(step_plan, chain),
        }
    return out


def _imbalance(step_plan: StepPlan, chain: PlanChain) -> dict[str, float]:
    """Costliest micro-batch over mean in each direction."""
    return dict(zip(("forward", "backward"), micro_batch_imbalance(step_plan, chain.situation.costs), strict=True))


def _peak_bytes(step_plan: StepPlan) -> float:
    """The most activations and prefix KV that any rank holds."""
    stages = range(step_plan.limits.num_stages)
    return max(peak for stage in stages for peak, _ in peaks_of_stage(step_plan, stage))


def _write(path: Path, plans: list[StepPlan]) -> None:
    try:
        path.write_text(json.dumps({"format": 1, "steps": [p.to_json() for p in plans]}))
    except OSError as error:
        raise EvenloadError(
            "the plan cannot be written", f"{path}: {error.strerror}", "choose another --out"
        ) from error
