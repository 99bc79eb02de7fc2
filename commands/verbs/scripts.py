"""Verbs about a training script that is not evenload's."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from .shared import AsJson, Overrides, RecipePath, load, show

Command = Annotated[list[str], Argument(metavar="[KEY=VALUE]... -- COMMAND ...")]


def run(
    recipe: RecipePath,
    command: Command,
    require: Annotated[
        bool, Option("--require", help="Fail if the script cannot be planned, instead of running it unmodified.")
    ] = False,
) -> None:
    """Run an unmodified training script with the recipe's plugins switched on."""
    from ..run import run as work

    raise SystemExit(work(recipe, command, required=require))


def env(
    recipe: RecipePath,
    overrides: Overrides = None,
    export: Annotated[str, Option("--export", help="shell, json, dotenv, k8s or ray.")] = "shell",
) -> None:
    """The variables that `evenload run` sets, for launchers that start processes on other machines."""
    from ..env import variables_as

    print(variables_as(load(recipe, overrides), export))


def check(
    recipe: RecipePath,
    command: Command,
    as_json: AsJson = False,
) -> None:
    """One step of an unmodified training script with the plugins on, without an update: what is on, refused, gained."""
    from ..check import EXIT_CODES
    from ..check import check as work
    from ..tables.show import stdout_aside

    with stdout_aside():
        result = work(recipe, command)
    show("check", result, as_json)
    raise SystemExit(EXIT_CODES[result["verdict"]])
