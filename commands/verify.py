"""Prove on the user's own recipe that the plugins changed nothing.

One global batch is computed twice from the same weights: by the trainer under the recipe's plan, and by the
integration's reference (stock model code, whole sequences one by one, no plan). Compared are the loss, every
parameter's gradient (||g - ref|| / ||ref||, the largest over parameters), and the tokens that were really run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

from ..core.recipe import Recipe
from ..core.workload import Slice, StepPlan
from .hosts import integration
from .job import Job, run_rank

TOLERANCE = {
    ("megatron", "fp64"): 1e-9,
    ("megatron", "fp32"): 2e-5,
    ("deepspeed", "fp32"): 2e-6,
}
"""Largest grad_rel_err that counts as rounding; bf16 rounds at 2^-8 and sums thousands of terms."""
BF16_TOLERANCE = 2e-2


def verify(recipe: Recipe) -> dict[str, Any] | None:
    """Verify on this rank."""
    return run_rank(recipe, _verify)


def _verify(job: Job) -> dict[str, Any]:
    job.say_unused("verify")
    planned = job.planner(job.drawing()).next()
    plan, tokens_of = planned.plan, job.tokens_of(planned.draw)
    with job.watchdog.working("planned gradients"):
        result, gradients = job.host.gradients(plan, tokens_of)
    with job.watchdog.working("reference gradients"):
        reference_loss, reference = integration(job.recipe.trainer).reference(
            job.recipe, job.host, tokens_of, plan.sequences
        )
    job.watchdog.at("comparing", waits=True)
    errors = {name: _error(gradients[name], reference[name]) for name in gradients}
    worst = max(errors, key=lambda name: errors[name])
    everyone: list[Any] = [None] * job.world.size
    mine = (job.host.plane_rank, result.executed, errors[worst], worst, sorted(gradients))
    dist.all_gather_object(everyone, mine)
    executed = {plane_rank: slices for plane_rank, slices, *_ in everyone}
    missing, repeated = count_tokens(plan, [s for slices in executed.values() for s in slices])
    error, name = max((e, n) for _, _, e, n, _ in everyone)
    # A pipeline stage has gradients of its own layers only; together the ranks must have all of the reference's.
    uncompared = sorted(set(reference) - {n for *_, names in everyone for n in names})
    tolerance = TOLERANCE.get((job.recipe.trainer, job.recipe.train.dtype), BF16_TOLERANCE)
    loss_error = abs(result.loss - reference_loss) / abs(reference_loss)
    return {
        "loss_rel_err": loss_error,
        "grad_rel_err": error,
        "worst_parameter": name,
        "uncompared_parameters": uncompared,
        "tokens_missing": missing,
        "tokens_repeated": repeated,
        "tolerance": tolerance,
        "exact": error <= tolerance and loss_error <= tolerance and not (missing or repeated or uncompared),
        "loss": result.loss,
        "reference_loss": reference_loss,
        "sequences": len(plan.sequences),
        "tokens": plan.num_tokens,
        "planner": plan.made_by,
        "host": job.host.describe(),
    }


def _error(gradient: Any, reference: Any) -> float:
    difference, size = (gradient.double() - reference.double()).norm(), reference.double().norm()
    return float(difference / size) if size else float(difference)


def count_tokens(plan: StepPlan, executed: list[Slice]) -> tuple[int, int]:
    """(tokens no rank ran, tokens run more than once), of the slices that ranks report."""
    runs = [np.zeros(s.length, dtype=np.int64) for s in plan.sequences]
    for s in executed:
        runs[s.sequence][s.start : s.stop] += 1
    missing = sum(int((r == 0).sum()) for r in runs)
    repeated = sum(int(np.maximum(r - 1, 0).sum()) for r in runs)
    return missing, repeated
