"""What a proof says at its end, of all its steps together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .steps import Proven


def summary(proven: Sequence[Proven], steps: int) -> dict[str, Any]:
    """All steps together; of errors the worst. What is not finite is named, and null in JSON."""
    worst = max(proven, key=lambda one: one.grad_rel_err / (one.tolerance or 1.0))
    first = proven[0]
    return {
        "exact": all(one.exact for one in proven),
        "loss_rel_err": max(one.loss_rel_err for one in proven),
        "grad_rel_err": worst.grad_rel_err,
        "worst_parameter": worst.worst_parameter,
        "tolerance": worst.tolerance,
        "norm_rel_err": max(one.norm_rel_err for one in proven),
        "update_rel_err": max(one.update_rel_err for one in proven),
        "tokens_missing": sum(one.tokens_missing for one in proven),
        "tokens_repeated": sum(one.tokens_repeated for one in proven),
        "routes_differ": sum(one.routes_differ for one in proven),
        "samples_wrong": sum(one.samples_wrong for one in proven),
        "uncompared_parameters": sorted({name for one in proven for name in one.uncompared}),
        "not_finite": sorted({name for one in proven for name in one.not_finite}),
        "over": [f"step {number}: {text}" for number, one in enumerate(proven) for text in one.over],
        "planners_failed": [f"step {number}: {text}" for number, one in enumerate(proven) for text in one.failed],
        "steps": steps,
        "batches": len(proven),
        "loss": first.loss,
        "sequences": first.sequences,
        "tokens": sum(one.tokens for one in proven),
        "targets": sum(one.targets for one in proven),
        "planner": first.planner,
        "each": [asdict(one) for one in proven],
    }
