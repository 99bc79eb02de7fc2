"""How many layers each pipeline stage has for the lengths that there are (``parallel.layers: auto``).

The numbers whose largest stage is smallest by the seconds of a batch, of which the output layer takes as much as

    head = L h t / ((1 - h) t + e + p)  layers      t, e  linear seconds of all tokens, of those at experts
                                                    h     the output layer's share of t     p  seconds of all pairs

of L layers. Stages fill and drain, first stages hold most, and where memory is short they recompute most: so numbers
next to these are planned and simulated as well, a layer moved from one stage to another, as long as one of them ends
the step sooner: a floor of each of the P (P - 1), and a plan of the batch where that is below the best step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations

from ..errors import EvenloadError
from ..plan.step_plan import Lengths
from ..recipe.recipe import Recipe
from ..recipe.stages import least_maximal
from .chain import PlanChain
from .floors import step_floor_s
from .judge import judge

MOVES = 4
"""Layers that are moved at the most."""


def settled(
    recipe: Recipe, num_ranks: int, batch: Lengths, *, groups: Lengths | None = None, neighbours: bool = True
) -> Recipe:
    """The recipe with numbers in place of auto, for batches like this one, int64 [K] in tokens.

    ``groups``: of its samples (`PlanChain.of_groups`). ``neighbours``: those of the first numbers are planned too.
    """
    if recipe.parallel.layers != "auto":
        return recipe
    chosen = first_numbers(recipe, num_ranks, batch)
    if not neighbours:
        return _numbered(recipe, chosen)
    least_s, tried = _step_s(recipe, chosen, num_ranks, batch, groups, math.inf), {chosen}
    for _ in range(MOVES):
        middle = chosen
        for layers in _neighbours(middle):
            if layers not in tried:
                tried.add(layers)
                step_s = _step_s(recipe, layers, num_ranks, batch, groups, least_s)
                least_s, chosen = (step_s, layers) if step_s < least_s else (least_s, chosen)
        if chosen == middle:
            break
    return _numbered(recipe, chosen)


def first_numbers(recipe: Recipe, num_ranks: int, batch: Lengths) -> tuple[int, ...]:
    """The numbers of layers whose largest stage is smallest for a batch, whatever memory there is."""
    context = PlanChain.of_recipe(recipe, recipe.layout(num_ranks)).context
    both, head, tokens = context.costs.both, context.head_frac, float(batch.sum())
    layers_s = (both.token_s * (1.0 - head) + both.expert_s) * tokens + both.pair_s * 0.5 * float(batch @ batch)
    num_layers = recipe.model.num_layers
    return least_maximal(num_layers, recipe.parallel.pp, num_layers * head * both.token_s * tokens / layers_s)


def _numbered(recipe: Recipe, layers: tuple[int, ...]) -> Recipe:
    return recipe.changed({"parallel.layers": list(layers)})


def _neighbours(layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for gives, takes in permutations(range(len(layers)), 2):
        if layers[gives] > 1:
            yield tuple(own + (stage == takes) - (stage == gives) for stage, own in enumerate(layers))


def _step_s(
    recipe: Recipe, layers: tuple[int, ...], num_ranks: int, batch: Lengths, groups: Lengths | None, bar_s: float
) -> float:
    """Predicted seconds of a batch under these numbers; infinite where nothing fits or can take less than ``bar_s``."""
    numbered = _numbered(recipe, layers)
    chain = PlanChain.of_recipe(numbered, numbered.layout(num_ranks)).of_groups(groups)
    if step_floor_s(chain, batch) >= bar_s:
        return math.inf
    try:
        planned = judge(chain.plan(batch), chain.context)
    except EvenloadError:
        return math.inf
    return planned.step_s if planned.fits else math.inf
