"""Training and proving a recipe in Python, on the ranks that it needs: what `evenload train` and `verify` do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..api import load_recipe
from ..core.errors import RankError
from ..core.input.bounds import LOCAL_RANKS, REPEATS, whole_number
from ..core.recipe.recipe import Recipe
from ..runtime.world.schedulers import adopt
from .launching.launch import on_ranks
from .launching.processes import RanksFailed
from .progress import Progress, silent
from .verbs import TRAIN, VERIFY, RankWork


def train(
    recipe: Recipe | str | Path, against: Sequence[str] = (), *, nproc: int | None = None, progress: Progress = silent
) -> dict[str, Any] | None:
    """Train a recipe, or the path or name of one; the object that `evenload train --json` prints.

    Local ranks are processes of their own, which print to stderr. In a process that torchrun has started this rank
    trains here: rank 0 returns the object, the others None.

    Args:
        against: baselines that train the same batches in turn, each its own model: stock, padded, in_order, ...
        nproc: local ranks; None: as many as parallel.* needs.
        progress: called on the way with a task's name, its steps done, how many there are (None: nobody knows), and how
            the last one was.

    Raises:
        EvenloadError: the recipe cannot be read, honoured or run here.
        RankError: a rank failed.
    """
    names = (against,) if isinstance(against, str) else tuple(against)
    return _answer(TRAIN, recipe, nproc, progress, ("--against", ",".join(names)), against=names)


def verify(
    recipe: Recipe | str | Path,
    steps: int = 3,
    *,
    weights: bool = False,
    generation: bool = False,
    prompts: Path | None = None,
    nproc: int | None = None,
    progress: Progress = silent,
) -> dict[str, Any] | None:
    """Hold steps of the run against plain training, through a resume; the object that `evenload verify --json` prints.

    ``exact`` says whether nothing differs. Ranks, ``progress`` and errors are those of `train`.

    Args:
        steps: updates, with the resume in their middle.
        weights: targets have drawn weights in the loss, negative ones and zeros among them.
        generation: samples against plain generation, in place of updates.
        prompts: a file of prompts to continue for that; None: some of the recipe's data.
    """
    steps = whole_number(steps, "steps", REPEATS)
    how: dict[str, Any] = {"weights": weights, "generation": generation, "prompts": prompts}
    words = ["--steps", str(steps), *(["--weights"] if weights else []), *(["--generate"] if generation else [])]
    words += ["--prompts", str(prompts.absolute())] if prompts else []
    return _answer(VERIFY, recipe, nproc, progress, words, steps=steps, **how)


def _answer(
    work: RankWork,
    recipe: Recipe | str | Path,
    nproc: int | None,
    progress: Progress,
    words: Sequence[str],
    **more: Any,
) -> dict[str, Any] | None:
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    adopt(os.environ)
    num_ranks = None if nproc is None else whole_number(nproc, "nproc", LOCAL_RANKS)
    with tempfile.TemporaryDirectory(prefix="evenload-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(chosen.model_dump(mode="json", exclude_unset=True)))
        try:
            return on_ranks(work, chosen, (work.verb, str(path), *words), num_ranks, progress, **more)
        except RanksFailed as end:
            raise RankError(
                f"{work.verb} failed on its ranks", f"exit code {end.code}", "see what they print above"
            ) from None
