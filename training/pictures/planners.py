"""What the pictures take from an `Forecast`: names to show, steps one after the other."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from ..forecast.forecast import Forecast, PlannedStep, Simulated

OURS = "evenload"


def label(name: str) -> str:
    """A planner's name as people read it."""
    return "stock" if name == "padded" else name.replace("_", " ")


def planners(step: PlannedStep) -> dict[str, Simulated]:
    """evenload first, then the baselines."""
    return {OURS: step.ours, **step.baselines}


def names(forecast: Forecast) -> list[str]:
    """Planners that planned every step with the recipe's settings: evenload, then the baselines, stock first."""
    steps = [planners(step) for step in forecast.steps]
    return [name for name in steps[0] if not any(step[name].ignores for step in steps)]


def about(forecast: Forecast) -> dict[str, Any]:
    """What the numbers rest on."""
    context = forecast.chain.context
    basis = {"costs": context.costs.source, "cluster": context.cluster.name, "layout": str(context.layout)}
    return {"times": "predicted", **basis, "command": command()}


def command() -> str:
    """What was typed, with the program's bare name."""
    return shlex.join(["evenload", *sys.argv[1:]])
