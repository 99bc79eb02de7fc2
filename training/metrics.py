"""What is recorded of every step, and what a run comes to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict

import numpy as np

from ..core.aliases import Floats
from ..core.planning.planner import Draw, Planned
from ..core.policies import seen_domains
from ..core.simulate.step import Span
from ..integrations.host.scoring import Scores
from ..integrations.host.trained import StepResult
from .replicas import ReplicaRow

_MOST_NATS = 700.0
"""The exponential of more is no float64."""


def perplexity(loss: float) -> float:
    """exp(loss), of a mean loss in nats."""
    return math.exp(min(loss, _MOST_NATS))


class DomainLoss(TypedDict):
    """What the samples of a domain came to in a step or a validation."""

    loss: float
    """Sum of their token losses over the number of their targets, in nats."""
    samples: int
    tokens: int
    targets: int


def domain_losses(names: Sequence[str], parts: Iterable[tuple[Draw, Scores]]) -> dict[str, DomainLoss]:
    """The losses of every domain that has a target, from draws and what they came to; ``names`` ascend."""
    rows = [
        (draw.domain, draw.lengths, one.losses, one.targets, one.targets if plain else one.weights)
        for draw, one in parts
        for plain in [one.weights is None or one.divisor is not None]  # of weights with a divisor no mean need exist
        if draw.domain is not None
    ]
    domain, lengths, losses, targets, weights = map(np.concatenate, zip(*rows, strict=True))
    seen = seen_domains(len(names), domain, losses, targets, weights=weights)
    tokens = np.bincount(domain, lengths, len(names)).astype(np.int64)
    columns = (sums.tolist() for sums in (seen.losses, seen.samples, tokens, seen.targets))
    return {
        name: DomainLoss(loss=loss / count, samples=samples, tokens=tokens, targets=count)
        for name, loss, samples, tokens, count in zip(names, *columns, strict=True)
        if count
    }


@dataclass(frozen=True, kw_only=True)
class StepMeasures:
    """Measures of one step, whatever is trained in it; seconds are wall time on the slowest rank."""

    step: int
    tokens: int
    targets: int = 0
    """Tokens whose loss counts."""
    step_s: float
    plan_s: float
    plan_wait_s: float
    imbalance: float
    """Busiest data-parallel rank over mean, measured."""
    padding_frac: float
    bound_s: float
    """Certified lower bound on the passes of the step, predicted; 0 where the planner gives none."""
    bubble_frac: float = 0.0
    """Idle share of the step: 1 - busy / step, mean over stages and plane ranks. Passes alone are busy."""
    replicas: tuple[ReplicaRow, ...] = ()
    """Where there are several; shares of ranks are then those of the first."""

    @classmethod
    def of(cls, step: int, planned: Planned, taken: MeasuredStep, **more: Any) -> Self:
        """The row of a step that was measured, with ``more`` that its run has."""
        plan, busy = planned.plan, taken.busy_s.sum(axis=0)
        return cls(
            step=step,
            tokens=int(planned.draw.part.whole.lengths.sum()) if planned.draw.part else plan.num_tokens,
            targets=taken.result.num_targets,
            step_s=taken.step_s,
            plan_s=taken.plan_s,
            plan_wait_s=taken.wait_s,
            imbalance=float(busy.max() / busy.mean()) if busy.any() else 1.0,
            padding_frac=plan.padding_frac,
            bound_s=plan.bound_s,
            bubble_frac=float((1 - taken.busy_s / taken.step_s).mean()),
            replicas=taken.replicas,
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class StepRow(StepMeasures):
    """What is recorded of a step that trained one model."""

    loss: float
    grad_norm: float
    lr: float
    delay_steps: float = 0.0
    """Steps by which this step's tokens were held back, on average."""
    waiting: int = 0
    """Samples that wait for a later step."""
    without_target: int = 0
    """Samples of the step that were left out, since none of their tokens carries loss."""
    mfu: float = 0.0
    """FLOPs that the step's sequences need (`shape.step_flops`) over those of all ranks at the cluster's rate."""
    predicted_s: float = 0.0
    """What the simulator gives for ``step_s``, planning left out; from the costs that the plan was made with."""
    bubble_worst: float = 0.0
    """Idle share of the stage and rank that idles most."""
    moe: dict[str, float] | None = None
    """Of a model with experts: tokens of the busiest rank of a group over those of its mean rank, with every expert at
    its home, over all layers and passes (imbalance_p50, imbalance_p95, imbalance_max), and as the ranks computed them
    (imbalance_after_*); copies of experts in a layer's pass, on average; copied_bytes, weights that all ranks took in
    for them; exposed_s, for which the rank that waits longest waits for these; failed_frac, the share of layers' passes
    whose planner failed, so that experts stayed at home."""
    domains: dict[str, DomainLoss] | None = None
    """Of each domain that is in the step."""


@dataclass(frozen=True)
class MeasuredStep:
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
    own_s: Floats
    """[world, 3]: of each rank, its passes, the reading of its samples, and its host (`stragglers`)."""
    moe: dict[str, float] | None = None
    """`StepRow.moe`."""
    spans: Sequence[Span] = ()
    """What all ranks did when (`StepResult.spans`), of tensor-parallel peers the first; empty unless recorded."""
    ends: str = ""
    """Why the run ends with this step, though it is not the last one; empty where it goes on."""
    replicas: tuple[ReplicaRow, ...] = ()
    """Where there are several."""


def summary(rows: list[StepRow]) -> dict[str, Any]:
    """Totals over the steps after the first, which pays for warming up; delay over all of them."""
    timed = rows[1:] or rows
    rates = rates_of(rows)
    if not timed:
        names = ("mfu", "padding_frac", "step_s", "predicted_s", "bubble_worst", "delay_steps")
        return {**rates, **dict.fromkeys(names, 0.0), "loss": None, "waiting": 0, "without_target": 0}
    by_time = {key: _mean(timed, key, by="step_s") for key in ("mfu", "bubble_worst")}
    return {
        **rates,
        **by_time,
        **{key: _mean(timed, key) for key in ("padding_frac", "step_s", "predicted_s")},
        "loss": rows[-1].loss,
        "delay_steps": _mean(rows, "delay_steps", by="tokens"),
        "waiting": rows[-1].waiting,
        "without_target": sum(row.without_target for row in rows),
    }


def totals(rows: list[StepRow], checkpoint: Path | None, best_checkpoint: Path | None = None) -> dict[str, Any]:
    """Sums over all steps; rates over those after the first, which pays for warming up. ``checkpoint``: the last;
    ``best_checkpoint``: that of the lowest validation loss."""
    rates = summary(rows)
    best = min(rows, key=lambda row: row.loss, default=None)
    return {
        **sums_of(rows),
        "last_step": rows[-1].step if rows else None,
        "tokens_per_s": rates["tokens_per_s"],
        "mfu": rates["mfu"],
        "loss": rates["loss"],
        "best_loss": best.loss if best else None,
        "best_step": best.step if best else None,
        "checkpoint": str(checkpoint) if checkpoint else None,
        "best_checkpoint": str(best_checkpoint) if best_checkpoint else None,
    }


def sums_of(rows: Sequence[StepMeasures]) -> dict[str, Any]:
    """Steps, tokens, targets and seconds of all steps."""
    sums = {key: sum(getattr(row, key) for row in rows) for key in ("tokens", "targets")}
    return {"steps": len(rows), **sums, "train_s": sum(row.step_s for row in rows)}


def rates_of(rows: Sequence[StepMeasures]) -> dict[str, float]:
    """Rates and shares of the steps after the first, which pays for warming up."""
    timed = rows[1:] or rows
    if not timed:
        return {"tokens_per_s": 0.0, "plan_share": 0.0, "imbalance": 1.0, "bubble_frac": 0.0}
    seconds = sum(row.step_s for row in timed)
    return {
        "tokens_per_s": sum(row.tokens for row in timed) / seconds,
        "plan_share": sum(row.plan_wait_s for row in timed) / seconds,
        "imbalance": _mean(timed, "imbalance"),
        "bubble_frac": _mean(timed, "bubble_frac", by="step_s"),
    }


def _mean(rows: Sequence[StepMeasures], key: str, by: str | None = None) -> float:
    weights = [getattr(row, by) for row in rows] if by else None
    return float(np.average([getattr(row, key) for row in rows], weights=weights))
