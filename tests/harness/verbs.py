"""Verbs of evenload on warm ranks: what a command does there, its processes and its launcher aside.

What is said on stderr, exit codes and planted faults need `forged`, whose ranks are processes of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import chdir, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from evenload.api import load_recipe

from harness.forge import PATIENT
from harness.world import World


class Verbs:
    """``verbs(place, "train", "recipe.yaml", "key=value", ..., against=["stock"])``: what the verb gives there, on the
    ranks of a world of the recipe's trainer and size."""

    def __init__(self, worlds: Callable[[str, int], World]) -> None:
        self._worlds = worlds

    def __call__(
        self, place: Path, name: str, recipe: str, *words: str, ranks: int = 0, **arguments: Any
    ) -> dict[str, Any]:
        """On `ranks` of them, else as many as the recipe needs; `arguments` of the verb must survive JSON."""
        asked = load_recipe(place / recipe, words)
        world = self._worlds(asked.trainer, ranks or asked.min_world_size)
        result: dict[str, Any]
        result, *_ = world.run(on_rank, name, str(place), recipe, [*words, PATIENT], arguments)
        return result


def on_rank(name: str, place: str, recipe: str, words: list[str], arguments: dict[str, Any]) -> dict[str, Any] | None:
    """What the verb gives on this rank."""
    from harness.groups import giving_groups_back

    of_plugins = {"generate": "evenload.plugins.rollout.generate", "score": "evenload.plugins.data.score"}
    work = getattr(import_module(of_plugins.get(name, f"evenload.training.verbs.{name}")), name)
    with chdir(place):
        asked = load_recipe(recipe, words)
        with giving_groups_back() if asked.trainer == "deepspeed" else nullcontext():
            result = work(asked, **arguments)
    return json.loads(json.dumps(result))  # type: ignore[no-any-return]
