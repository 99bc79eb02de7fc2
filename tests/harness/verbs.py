"""Verbs of evenload on warm ranks: what a command does there, its processes and its launcher aside.

What is said on stderr, exit codes and planted faults need `forged`, whose ranks are processes of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from typing import Any

from evenload.api import load_recipe

from harness.forge import PATIENT, Forge
from harness.world import World


class Verbs:
    """``verbs(place, "train", "recipe.yaml", "key=value", ..., against=["stock"])``: what the verb gives there.

    Its ranks are those of a world of the recipe's trainer and size, which serves all who ask for it.
    """

    def __init__(self, forge: Callable[[str], Forge], folder: Callable[[str], Path]) -> None:
        self._forge, self._folder = forge, folder
        self._worlds: dict[tuple[str, int], World] = {}

    def __call__(
        self, place: Path, name: str, recipe: str, *words: str, ranks: int = 0, **arguments: Any
    ) -> dict[str, Any]:
        """On `ranks` of them, else as many as the recipe needs; `arguments` of the verb must survive JSON."""
        asked = load_recipe(place / recipe, words)
        world = self._world(asked.trainer, ranks or asked.min_world_size)
        result: dict[str, Any]
        result, *_ = world.run(on_rank, name, str(place), recipe, [*words, PATIENT], arguments)
        return result

    def _world(self, trainer: str, size: int) -> World:
        known = self._worlds.get((trainer, size))
        if known is None or not known.active:
            known = World(self._forge(trainer), size, self._folder(f"{trainer}{size}"))
            self._worlds[trainer, size] = known
        return known

    def close(self) -> None:
        for world in self._worlds.values():
            if world.active:
                world.close()


def on_rank(name: str, place: str, recipe: str, words: list[str], arguments: dict[str, Any]) -> dict[str, Any] | None:
    """What the verb gives on this rank."""
    work = getattr(import_module(f"evenload.training.verbs.{name}"), name)
    with chdir(place):
        result = work(load_recipe(recipe, words), **arguments)
    return json.loads(json.dumps(result))  # type: ignore[no-any-return]
