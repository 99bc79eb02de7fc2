"""``evenload check RECIPE -- COMMAND``: one step of the command with the plugins on, and nothing updated or saved.

The command runs as under `evenload run`. Its first step is planned and its passes run, on all ranks; right before the
optimizer's update every process ends. What the plan gains is predicted by the simulator from the lengths of that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.recipe.carried import CHECK
from ..core.recipe.recipe import Recipe
from ..integrations.unmodified.run_folder import RunFolder
from .run import asked, planned_steps, ran, why_nothing

EXIT_CODES = {"planned": 0, "nothing planned": 1, "failed": 1, "refused": 2}
"""By the verdict; ``failed``: the command ended with an error of its own."""


def check(recipe: str | Path, words: Sequence[str]) -> dict[str, Any]:
    """The documented result of ``check --json``. Raises EvenloadError as `run.run`; what the command prints goes on.

    Args:
        words: ``key=value`` changes of the recipe, then the command.
    """
    chosen, command = asked(recipe, words)
    with ran(chosen, command, **{CHECK: "1"}) as (folder, code):
        return _result(folder, chosen, code)


def _result(folder: RunFolder, recipe: Recipe, code: int) -> dict[str, Any]:
    refusals = [{"what": one.what, "found": one.found, "do": one.do} for one in folder.refusals]
    step = folder.record("check") or {}
    done = "planned" if step else "nothing planned"
    verdict = "refused" if refusals else "failed" if code else done
    says = planned_steps(folder) if folder.steps else why_nothing(folder, recipe, code)
    if verdict == "failed" and folder.steps:
        says += f", then the command ended with exit code {code}"
    names = [plugin.name for plugin in recipe.enabled()]
    rows = {name: {"name": name, "refused": None, "gain": None} for name in names}
    rows |= {row["name"]: row for row in step.get("plugins", ())}
    return {
        "verdict": verdict,
        "says": says,
        "plugins": [{**row, "on": verdict == "planned" and row["refused"] is None} for row in rows.values()],
        "step": {key: value for key, value in step.items() if key != "plugins"} or None,
        "costs": recipe.costs,
        "cluster": recipe.cluster,
        "refusals": refusals,
        "idle": [one._asdict() for one in folder.idle],
    }
