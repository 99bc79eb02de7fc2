"""Verbs of evenload on the warm ranks of a world: what a command does there, its process and its launcher aside.

What is said on stderr, exit codes and planted faults need `forged`, whose ranks are processes of their own.
"""

from __future__ import annotations

import json
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from typing import Any

from evenload.api import load_recipe

from harness.forge import PATIENT
from harness.world import World


def verb(world: World, name: str, place: Path, recipe: str, *words: str, **arguments: Any) -> dict[str, Any]:
    """What ``evenload NAME RECIPE WORDS`` gives in a folder; ``arguments``: the verb's other ones, which survive JSON."""
    return world.run(on_rank, name, str(place), recipe, [*words, PATIENT], arguments)[0]  # type: ignore[no-any-return]


def on_rank(name: str, place: str, recipe: str, words: list[str], arguments: dict[str, Any]) -> dict[str, Any] | None:
    """What the verb gives on this rank, as JSON has it."""
    work = getattr(import_module(f"evenload.training.verbs.{name}"), name)
    with chdir(place):
        result = work(load_recipe(recipe, words), **arguments)
    return json.loads(json.dumps(result))
