"""What is recorded of every step, and what a run comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.aliases import Floats
from ..core.simulate.step import Span
from ..integrations.host.trained import StepResult


@dataclass(frozen=True)
class StepRow:
    """Measures of one step; seconds are wall time on the slowest rank."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_s: float
    plan_s: float
    plan_wait_s: float
    imbalance: float
    """Busiest data-parallel rank over mean, measured."""
    padding_frac: float
    bound_s: float
    """Certified lower bound on the busiest rank's time, predicted; 0 where the planner gives none."""
    delay_steps: float = 0.0
    """Steps by which this step's tokens were held back, in the mean."""
    waiting: int = 0
    """Samples that wait for a later step."""
    without_target: int = 0
    """Samples of the step that were left out, since none of their tokens carries loss."""
    targets: int = 0
    """Tokens whose loss counts."""
    mfu: float = 0.0
    """FLOPs that the step's sequences need (`shape.step_flops`) over those of all ranks at the cluster's rate."""
    predicted_s: float = 0.0
    """What the simulator gives for ``step_s``, planning left out; from the costs that the plan was made with."""
    bubble_frac: float = 0.0
    """Idle share of the step: 1 - busy / step, mean over stages and plane ranks. Passes alone are busy."""
    bubble_worst: float = 0.0
    """Of the stage and rank that idles most."""
    moe: dict[str, float] | None = None
    """Of a model with experts: tokens of the busiest rank of a group over those of its mean rank, with every expert at
    its home, over all layers and passes (imbalance_p50, imbalance_p95, imbalance_max), and as the ranks computed them
    (imbalance_after_*); copies of experts in a layer's pass, in the mean; copied_bytes, weights that all ranks took in
    for them; exposed_s, for which the rank that waits longest waits for these; failed_frac, the share of layers' passes
    whose planner failed, so that experts stayed at home."""


@dataclass(frozen=True)
class Taken:
    """One step as the ranks measured it; arrays are [stages, plane ranks], means over tensor-parallel peers."""

    result: StepResult
    """This rank's."""
    step_s: float
    """Of the slowest rank, waiting for the plan included."""
    plan_s: float
    wait_s: float
    """For the plan."""
    busy_s: Floats
    forward_s: Floats
    moe: dict[str, float] | None = None
    """`StepRow.moe`."""
    spans: Sequence[Span] = ()
    """What all ranks did when (`StepResult.spans`), of tensor-parallel peers the first; empty unless recorded."""


def summary(rows: list[StepRow]) -> dict[str, Any]:
    """Totals over the steps after the first, which pays for warming up; delay over all of them."""
    timed = rows[1:] or rows
    if not timed:
        empty = {
            "tokens_per_s": 0.0,
            "mfu": 0.0,
            "imbalance": 1.0,
            "padding_frac": 0.0,
            "loss": None,
            "plan_share": 0.0,
        }
        timing = dict.fromkeys(("step_s", "predicted_s", "bubble_frac", "bubble_worst", "delay_steps"), 0.0)
        return {**empty, **timing, "waiting": 0, "without_target": 0}
    seconds = sum(row.step_s for row in timed)
    return {
        "tokens_per_s": sum(row.tokens for row in timed) / seconds,
        "mfu": sum(row.mfu * row.step_s for row in timed) / seconds,
        "imbalance": float(np.mean([row.imbalance for row in timed])),
        "padding_frac": float(np.mean([row.padding_frac for row in timed])),
        "plan_share": sum(row.plan_wait_s for row in timed) / seconds,
        "step_s": seconds / len(timed),
        "predicted_s": float(np.mean([row.predicted_s for row in timed])),
        "bubble_frac": sum(row.bubble_frac * row.step_s for row in timed) / seconds,
        "bubble_worst": sum(row.bubble_worst * row.step_s for row in timed) / seconds,
        "loss": rows[-1].loss,
        "delay_steps": float(np.average([row.delay_steps for row in rows], weights=[row.tokens for row in rows])),
        "waiting": rows[-1].waiting,
        "without_target": sum(row.without_target for row in rows),
    }


def totals(rows: list[StepRow], checkpoint: Path | None) -> dict[str, Any]:
    """Sums over all steps; rates over those after the first, which pays for warming up. ``checkpoint``: the last."""
    rates = summary(rows)
    best = min(rows, key=lambda row: row.loss, default=None)
    return {
        "steps": len(rows),
        "last_step": rows[-1].step if rows else None,
        "tokens": sum(row.tokens for row in rows),
        "targets": sum(row.targets for row in rows),
        "train_s": sum(row.step_s for row in rows),
        "tokens_per_s": rates["tokens_per_s"],
        "mfu": rates["mfu"],
        "loss": rates["loss"],
        "best_loss": best.loss if best else None,
        "best_step": best.step if best else None,
        "checkpoint": str(checkpoint) if checkpoint else None,
    }
