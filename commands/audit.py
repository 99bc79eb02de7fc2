"""``evenload audit RECIPE -- COMMAND``: the command's own first step judged, sample by sample; nothing is planned.

The command runs as it does by itself up to its first update. There every sample of its batches runs once more alone
through the same model, and what differs is named with its sample and token (`integrations.transformers.audit.audit`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..api import load_recipe
from ..core.errors import EvenloadError
from ..core.recipe.carried import AUDIT
from ..core.recipe.recipe import Recipe
from ..core.recipe.traits import trainer_called, trainers_with
from ..integrations.unmodified.run_folder import RunFolder
from .run import divided, run_in

EXIT_CODES = {"right": 0, "wrong": 1, "nothing judged": 2}
"""By the verdict."""


def audit(recipe: str | Path, words: Sequence[str], border: int | None = None) -> dict[str, Any]:
    """The documented result of ``audit --json``; what the command prints goes on.

    Args:
        words: ``key=value`` changes of the recipe, then the command.
        border: the token that ends a sample; None: none does by itself.

    Raises EvenloadError as `run.run`, and where batches of the recipe's trainer cannot be judged.
    """
    overrides, command = divided(words)
    chosen = load_recipe(recipe, overrides)
    if not trainer_called(chosen.trainer).audits:
        do = f"write trainer: {' or '.join(trainers_with(lambda one: one.audits))} for a script of Hugging Face models"
        raise EvenloadError("no batches of this trainer's loops can be judged", f"trainer: {chosen.trainer}", do)
    with tempfile.TemporaryDirectory(prefix="evenload-") as path:
        folder = RunFolder(Path(path))
        code = run_in(folder, chosen, command, **{AUDIT: "" if border is None else str(border)})
        return _result(folder, chosen, code)


def _result(folder: RunFolder, recipe: Recipe, code: int) -> dict[str, Any]:
    step = folder.audit
    if step is None or not step["judged"]["states"]:
        return {"verdict": "nothing judged", "says": _why_nothing(folder, recipe, code), "step": step}
    if step["num_wrong"]:
        first = step["wrong"][0]
        return {"verdict": "wrong", "says": f"{place(first)}: {first['what']}; {first['found']}", "step": step}
    says = "; ".join([f"{step['samples']} samples are computed as each of them alone", *step["remarks"]])
    return {"verdict": "right", "says": says, "step": step}


def place(wrong: dict[str, Any]) -> str:
    """``token 0 of sample 1 of micro-batch 0 on rank 0 (row 0, slots 7 to 18)``."""
    slots = f"row {wrong['row']}, slots {wrong['start']} to {wrong['stop'] - 1}"
    where = f"sample {wrong['sample']} of micro-batch {wrong['micro_batch']} on rank {wrong['rank']}"
    return f"token {wrong['token']} of {where} ({slots})"


def _why_nothing(folder: RunFolder, recipe: Recipe, code: int) -> str:
    if folder.refusals:
        return f"{folder.refusals[0].what} ({folder.refusals[0].found}); {folder.refusals[0].do}"
    if code:
        return f"the command ended with exit code {code} before its first update; mend what it says above"
    if folder.audit and folder.audit["not_judged"]:
        return f"what a sample alone cannot be given: {', '.join(folder.audit['not_judged'])}"
    names = " or ".join(trainer_called(recipe.trainer).first_imports)
    return (
        f"no process of this machine that imports {names} trained a Hugging Face model with an output layer up to an "
        "update by one of torch's optimizers; give the command that trains one"
    )
