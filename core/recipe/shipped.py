"""The recipes that come with evenload, by name: ``gpu-node`` is recipes/gpu-node.yaml wherever one stands."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "recipes"


def shipped() -> dict[str, Path]:
    """The files of the recipes that come with evenload, by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def file_of(recipe: str | Path) -> str | Path:
    """The file of a recipe that is given by its path or by the name of one that comes with evenload; a file of that
    name goes first."""
    names = shipped()
    return names[str(recipe)] if str(recipe) in names and not os.path.isfile(recipe) else recipe


def place_of(path: Path) -> Path:
    """The place that a recipe names: below where one stands, or else what comes with evenload under that name."""
    return ROOT / path if not path.exists() and (ROOT / path).exists() else path
