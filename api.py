"""evenload in Python without torch or a trainer: recipes, and the plan of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import integrations  # noqa: F401  # importing it tells what every trainer is like
from .core.input.bounds import lengths_of_batch, refuse_endless
from .core.plan.step_plan import StepPlan, as_lengths
from .core.planning.chain import PlanChain
from .core.recipe import recipe as recipes
from .core.recipe.recipe import Recipe
from .core.recipe.rules import refuse_idle_ranks
from .core.registry import load_plugins as load_plugins


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe from a YAML file, or the shipped one of that name, with ``a.b=value`` overrides. Raises
    EvenloadError."""
    load_plugins()
    return recipes.load(path, overrides)


def plan(
    recipe: Recipe | str | Path, lengths: Any, world_size: int | None = None, tenants: Any = None, groups: Any = None
) -> StepPlan:
    """The checked plan of one global batch for a recipe, or for the path or name of one.

    Args:
        lengths: tokens of each sample of the batch, integers [S] of 1 or more, in a list, an array or an iterator.
        world_size: number of ranks; null takes the recipe's parallel.*.
        tenants: number of each sample's tenant, integers [S]; None: there are none.
        groups: number of each sample's group, integers [S], of which those of one stay together (`plugins.packing`);
            None: as the recipe says.

    Raises:
        EvenloadError: the recipe cannot be read or honoured, or has a smaller global batch than there are data-parallel
            ranks; there is no length, or one is no positive integer, or over every cap; tenants or groups are not one a
            sample.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    batch = lengths_of_batch(lengths)
    layout = recipe.layout(world_size)
    if not recipe.adapts:
        refuse_idle_ranks(recipe.train, layout.dp)
    chain = PlanChain.of_recipe(recipe, layout).of_groups(groups)
    refuse_endless(batch, chain.largest_slice)
    return chain.plan(as_lengths(batch), None if tenants is None else as_lengths(tenants))
