"""``evenload env RECIPE``: the variables that `evenload run` sets, for launchers that start processes elsewhere.

    eval "$(evenload env recipe.yaml)"; torchrun ...              in a job's script, on each machine
    evenload env recipe.yaml --export dotenv      lines of an environment file
    evenload env recipe.yaml --export k8s         the ``env`` of a container
    evenload env recipe.yaml --export ray         a runtime_env of Ray, as ``ray job submit --runtime-env`` takes it

What they switch on is what `evenload run` does, but for its last line: who starts the command by another launcher has
the messages of its ranks. The folder on PYTHONPATH is that of this installation; where evenload lies elsewhere on the
other machines, ask there.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..core.errors import EvenloadError
from ..core.input.format import to_json
from ..core.recipe.carried import VARIABLE, carried
from ..core.recipe.recipe import Recipe
from ..core.recipe.rules import refuse_in_loops
from ..integrations.unmodified.run_folder import VARIABLE as FOLDER
from ..training.hosts import require

STARTUP = Path(__file__).parent / "startup"


def variables(recipe: Recipe, python_path: str = "") -> dict[str, str]:
    """What `evenload run` adds to the environment; ``python_path``: what is on PYTHONPATH already.

    Raises EvenloadError where the recipe's trainer is missing, or it trains adapters, which no loop of others does.
    """
    refuse_in_loops(recipe)
    require(recipe.trainer)
    path = os.pathsep.join([str(STARTUP), *filter(None, [python_path])])
    return {"PYTHONPATH": path, VARIABLE: carried(recipe)}


def _shell(values: Mapping[str, str]) -> str:
    own = {name: shlex.quote(value) for name, value in values.items()}
    own["PYTHONPATH"] += "${PYTHONPATH:+:$PYTHONPATH}"
    return "\n".join(f"export {name}={value}" for name, value in own.items())


def _lines(values: Mapping[str, str]) -> str:
    return "\n".join(f"{name}={value}" for name, value in values.items())


def _container(values: Mapping[str, str]) -> str:
    rows = [{"name": name, "value": value} for name, value in values.items()]
    return yaml.safe_dump(rows, sort_keys=False, width=1 << 20).rstrip()


def ray_runtime_env(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """A runtime_env of Ray that also carries what this process has of `evenload run`, whose processes Ray asks it of
    (RAY_RUNTIME_ENV_HOOK), to workers wherever their cluster was started. What is on PYTHONPATH there stays."""
    present = dict(runtime_env or {})
    variables = present.get("env_vars") or {}
    own = {name: value for name, value in os.environ.items() if name.startswith((VARIABLE, FOLDER))}
    own["PYTHONPATH"] = os.pathsep.join([str(STARTUP), variables.get("PYTHONPATH", "${PYTHONPATH}")])
    return present | {"env_vars": {**variables, **own}}


def _runtime_env(values: Mapping[str, str]) -> str:
    own = {**values, "PYTHONPATH": os.pathsep.join([values["PYTHONPATH"], "${PYTHONPATH}"])}
    return yaml.safe_dump({"env_vars": own}, sort_keys=False, width=1 << 20).rstrip()


EXPORTS: Mapping[str, Any] = {
    "shell": _shell,
    "json": to_json,
    "dotenv": _lines,
    "k8s": _container,
    "ray": _runtime_env,
}


def variables_as(recipe: Recipe, export: str) -> str:
    """The variables as text of one of `EXPORTS`. Raises EvenloadError for another word, and as `variables`."""
    if export not in EXPORTS:
        raise EvenloadError("--export knows no such form", repr(export), f"give one of {', '.join(EXPORTS)}")
    present = os.environ.get("PYTHONPATH", "") if export == "dotenv" else ""  # such lines replace the variable
    return str(EXPORTS[export](variables(recipe, present)))
