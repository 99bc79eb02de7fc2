"""What `planner.refit` gains where the cost model is wrong: real training, with costs of another model.

    python benchmarks/costs/refit.py [RECIPE] [key=value ...] [--costs PRESET] [--right cpu] [--json] [--out FILE]

One recipe trains three times on the same batches: with the wrong costs, with the same and ``planner.refit``, and with
the right ones (of ``evenload profile``). Imbalance is measured: busiest rank over mean. "predicted / measured" is of a
step, waiting for the plan left out; it starts as far off as the costs are and ends at 1 if the model follows.

The default, galvatron-llama2-7b, is of a 7B model on a GPU: next to the linear part its attention counts far less than
it takes in the small model that is trained, so long sequences are packed as if they were cheap. 2 to 3 minutes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from evenload.benchmarks.frame import command, main, options
from evenload.commands.tables.show import grid

SETTINGS = ("train.steps=16", "train.global_batch_size=8", "data.max_length=4096", "plugins.packing.max_tokens=4096")
LEARNING_STEPS = 5
"""Steps before refit shapes a plan, warm-up included (docs/measuring.md); averages are over the rest."""


def train(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """The result of ``evenload train --json``."""
    return command("train", recipe, *overrides)


def numbers(result: dict[str, Any]) -> dict[str, Any]:
    """Of one run."""
    steps = result["steps"]
    learned = steps[LEARNING_STEPS:] or steps[-1:]
    return {
        "imbalance": [row["imbalance"] for row in steps],
        "predicted_over_measured": [row["predicted_s"] / (row["step_s"] - row["plan_wait_s"]) for row in steps],
        "imbalance_mean": float(np.mean([row["imbalance"] for row in learned])),
        "step_s": float(np.mean([row["step_s"] for row in learned])),
        "predicted_s": float(np.mean([row["predicted_s"] for row in learned])),
        "refit": result["refit"],
    }


def benchmark(recipe: str, overrides: list[str], wrong: str, right: str) -> dict[str, Any]:
    """All three runs."""
    settings = {
        f"{wrong}": [f"costs={wrong}"],
        f"{wrong}, refit": [f"costs={wrong}", "planner.refit=true"],
        f"{right}": [f"costs={right}"],
    }
    runs, host = {}, {}
    for name, more in settings.items():
        result = train(recipe, [*SETTINGS, *overrides, *more])
        runs[name], host = numbers(result), result["host"]
    return {"recipe": recipe, "overrides": overrides, "host": host, "learning_steps": LEARNING_STEPS, "runs": runs}


def table(result: dict[str, Any]) -> Any:
    """A row a run, then predicted / measured at some steps."""
    steps = len(next(iter(result["runs"].values()))["imbalance"])
    shown = sorted({1, 3, 5, 7, 9, steps // 2, steps - 1} & set(range(steps)))
    rows = [
        (
            name,
            run["imbalance_mean"],
            f"{1e3 * run['step_s']:.0f} ms",
            *(f"{run['predicted_over_measured'][step]:.3g}" for step in shown),
        )
        for name, run in result["runs"].items()
    ]
    head = ("costs", "imbalance", "step", *(f"step {step}" for step in shown))
    caption = (
        f"imbalance and step: measured, from step {result['learning_steps']} on; then predicted / measured seconds of "
        f"single steps\n{result['host']['trainer']} on {result['host']['device']}, dp {result['host'].get('dp', '-')}"
    )
    return grid(f"refit of wrong costs, {result['recipe']}", head, rows, caption)


def measured(asked: Any) -> dict[str, Any]:
    recipe, *overrides = asked.words if asked.words and "=" not in asked.words[0] else ["quickstart", *asked.words]
    return benchmark(recipe, overrides, asked.costs, asked.right)


if __name__ == "__main__":
    main(options(__doc__, words=..., costs="galvatron-llama2-7b", right="cpu"), measured, table)
