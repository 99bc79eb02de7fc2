"""A recipe that is trained a few steps on ranks of this machine, of which nothing is kept."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from ...core.recipe.recipe import Recipe
from ..progress import silent
from .launch import on_ranks


def trained(recipe: Recipe, num_ranks: int, steps: int) -> dict[str, Any]:
    """What ``train --json`` says of so many steps, costs fitted to them. Raises EvenloadError, and SystemExit where
    ranks have said what is wrong."""
    ends = {"train.steps": steps, "train.epochs": None, "train.max_tokens": None, "train.export": None}
    apart: dict[str, Any] = {"checkpoint": {}, "log": {}, "data.validation": None}
    few = recipe.changed({**ends, **apart, "planner.refit": True})
    with tempfile.TemporaryDirectory(prefix="evenload-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(few.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
        result = on_ranks("train", few, ["train", str(path)], num_ranks, silent)
    assert result is not None
    return result
