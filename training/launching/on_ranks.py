"""A verb's work on its ranks: this process is one of them, or it checks the request and starts them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ...core.errors import EvenloadError
from ...core.input.bounds import LOCAL_RANKS
from ...core.recipe.recipe import Recipe
from ...runtime.files import refuse_taken
from ...runtime.world.variables import job_variables
from ..preflight import preflight
from ..progress import Progress, silent
from ..tenants.arrivals.preflight import preflight as preflight_of_tenants
from . import launch, progress_link


def on_ranks(
    verb: str, recipe: Recipe, words: Sequence[str], num_ranks: int | None, progress: Progress, **arguments: Any
) -> dict[str, Any] | None:
    """What the verb gives on rank 0; None on other ranks, and where the launcher takes it.

    ``words``: the command line by which local ranks do the same. Raises EvenloadError, and SystemExit where ranks that
    this has started have said themselves what is wrong.
    """
    if verb == "train" and recipe.train.export is not None:
        refuse_taken(recipe.train.export)
    if launch.is_rank():
        job_variables()  # before anything is loaded that takes long
        launch.end_with_launcher()
        work = getattr(import_module(f"..verbs.{verb}", __package__), verb)
        progress = progress_link.inherited() or (progress if os.environ["RANK"].strip() == "0" else silent)
        return work(recipe, progress=progress, **arguments)  # type: ignore[no-any-return]
    size = _checked(verb, recipe, num_ranks, arguments.get("against", ()))
    if size > LOCAL_RANKS:
        do = f"start them with torchrun -m evenload {verb} on several machines"
        raise EvenloadError(f"one machine runs at most {LOCAL_RANKS} ranks", f"parallel.* needs {size}", do)
    return launch.launch(words, size, recipe.safety, progress)


def _checked(verb: str, recipe: Recipe, num_ranks: int | None, against: tuple[str, ...]) -> int:
    """How many ranks a recipe needs that can run on its data, with these baselines. Raises EvenloadError."""
    if verb == "export":  # without data
        return recipe.layout(num_ranks).world_size
    if recipe.adapts:
        needs = verb != "verify"
        return preflight_of_tenants(recipe, num_ranks, against, needs_tenants=needs).chain.context.layout.world_size
    chain = preflight(recipe, num_ranks).chain
    for name in against:
        chain.offer(name)
    return chain.context.layout.world_size
