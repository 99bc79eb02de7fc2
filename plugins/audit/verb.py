"""``evenload audit RECIPE -- COMMAND``: the command's own first step judged, sample by sample; nothing is planned.

The command runs as it does by itself up to its first update. There every sample of its batches runs once more alone
through the same model, and what differs is named with its sample and token (`plugins.audit.audit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from ...commands.run import asked, ran
from ...commands.tables.show import stdout_aside
from ...commands.verbs.scripts import Command
from ...commands.verbs.shared import AsJson, RecipePath, show
from ...core.errors import EvenloadError
from ...core.input.bounds import SIZE, number_of_word
from ...core.recipe.carried import ROWS
from ...core.recipe.recipe import Recipe
from ...core.recipe.traits import trainer_called, trainers_with
from ...integrations.unmodified.run_folder import RunFolder
from . import rows
from .table import place, table

EXIT_CODES = {"right": 0, "wrong": 1, "nothing judged": 2}
"""By the verdict."""


def audit(
    recipe: RecipePath,
    command: Command,
    border: Annotated[str | None, Option("--border", metavar="ID", help="The token that ends a sample.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge the batches of a training script as it makes them: each sample as it is alone? Nothing is planned."""
    token = None if border is None else number_of_word(border, "--border", SIZE)
    with stdout_aside():
        result = judged(recipe, command, token)
    show("audit", result, as_json, table)
    raise SystemExit(EXIT_CODES[result["verdict"]])


def judged(recipe: str | Path, words: Sequence[str], border: int | None = None) -> dict[str, Any]:
    """The documented result of ``audit --json``; what the command prints goes on.

    Args:
        words: ``key=value`` changes of the recipe, then the command.
        border: the token that ends a sample; None: none does by itself.

    Raises EvenloadError as `run.run`, and where batches of the recipe's trainer cannot be judged.
    """
    chosen, command = asked(recipe, words)
    judgeable = trainers_with(lambda one: "transformers" in one.first_imports)
    if chosen.trainer not in judgeable:
        do = f"write trainer: {' or '.join(judgeable)} for a script of Hugging Face models"
        raise EvenloadError("no batches of this trainer's loops can be judged", f"trainer: {chosen.trainer}", do)
    ends = {} if border is None else {rows.BORDER: str(border)}
    with ran(chosen, command, **{ROWS: rows.__name__}, **ends) as (folder, code):
        return _result(folder, chosen, code)


def _result(folder: RunFolder, recipe: Recipe, code: int) -> dict[str, Any]:
    step = folder.record("audit")
    if step is None or not step["judged"]["states"]:
        return {"verdict": "nothing judged", "says": _why_nothing(folder, recipe, code, step), "step": step}
    if step["num_wrong"]:
        first = step["wrong"][0]
        return {"verdict": "wrong", "says": f"{place(first)}: {first['what']}; {first['found']}", "step": step}
    says = "; ".join([f"{step['samples']} samples are computed as each of them alone", *step["remarks"]])
    return {"verdict": "right", "says": says, "step": step}


def _why_nothing(folder: RunFolder, recipe: Recipe, code: int, step: dict[str, Any] | None) -> str:
    if folder.refusals:
        return f"{folder.refusals[0].what} ({folder.refusals[0].found}); {folder.refusals[0].do}"
    if code:
        return f"the command ended with exit code {code} before its first update; mend what it says above"
    if step and step["not_judged"]:
        return f"what a sample alone cannot be given: {', '.join(step['not_judged'])}"
    names = " or ".join(trainer_called(recipe.trainer).first_imports)
    return (
        f"no process of this machine that imports {names} trained a Hugging Face model with an output layer up to an "
        "update by one of torch's optimizers; give the command that trains one"
    )
