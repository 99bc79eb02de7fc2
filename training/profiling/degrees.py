"""The layouts on which a profile measures: degrees of tensor parallelism, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import EvenloadError
from ...core.recipe.recipe import Recipe


def at_degree_of(recipe: Recipe, tp: int, num_ranks: int) -> Recipe:
    """What is measured of a recipe: nothing recomputed, one stage, so many tensor-parallel ranks and copies of them."""
    divides = recipe.megatron.sequence_parallel and tp > 1
    degrees = {"tp": tp, "pp": 1, "cp": 1, "ep": 1, "dp": max(1, num_ranks // tp)}
    changes = {f"parallel.{name}": degree for name, degree in degrees.items()}
    return recipe.changed({**changes, "train.recompute": False, "megatron.sequence_parallel": divides})


def layouts_of(recipe: Recipe, degrees: Sequence[int], num_ranks: int) -> list[Recipe]:
    """What is measured of a recipe at each degree. Raises EvenloadError for one that such a number of ranks, or the
    model, cannot have."""
    for tp in degrees:
        if num_ranks % tp:
            what, do = "a degree of tensor parallelism does not divide the ranks", "choose --nproc and --tp that fit"
            raise EvenloadError(what, f"--tp {tp}, {num_ranks} ranks", do)
    return [at_degree_of(recipe, tp, num_ranks) for tp in degrees]
