"""What a profile measures into one file: degrees of tensor parallelism, what ranks divide, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.costs.costs import Sharding
from ...core.errors import EvenloadError, shown
from ...core.recipe.recipe import Recipe
from ...core.recipe.traits import trainer_called


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


def sharded_otherwise(
    recipe: Recipe, others: Mapping[str, Recipe], degrees: Sequence[int] = ()
) -> dict[Sharding, Recipe]:
    """Recipes by what their ranks divide between them; ``others``: by the words that change this one. Raises
    EvenloadError for one that costs do not tell from it, or from another, or together with several ``degrees``."""
    if others and len(degrees) > 1:
        what, do = "one file has several degrees of tensor parallelism or several shardings", "write a file for each"
        raise EvenloadError(what, f"--tp {','.join(map(str, degrees))} and --also {shown(next(iter(others)))}", do)
    known: dict[Sharding, Recipe] = {trainer_called(recipe.trainer).traits(recipe).sharding: recipe}
    for word, changed in others.items():
        sharding = trainer_called(changed.trainer).traits(changed).sharding
        if sharding in known or (changed.trainer, changed.model) != (recipe.trainer, recipe.model):
            what = "one file tells recipes apart by what their ranks divide (none, optimizer, parameters)"
            do = "e.g. deepspeed.zero_stage=3 in addition to 1; else write another file"
            raise EvenloadError(what, f"--also {shown(word)}: {sharding}", do)
        known[sharding] = changed
    return {sharding: one for sharding, one in known.items() if one is not recipe}
