"""How many layers each pipeline stage has for the lengths that there are (``parallel.layers: auto``).

First the numbers whose largest stage is smallest by the seconds of a batch, of which the output layer takes as much as

    head = L h t / ((1 - h) t + e + p)  layers      t, e  linear seconds of all tokens, of those at experts
                                                    h     the output layer's share of t     p  seconds of all pairs

of L layers. Then numbers next to them, a layer moved from one stage to the stage beside it, as long as one of these
ends the step sooner: all play the plan of the batch under the first numbers, in its order, with seconds and bytes of
their own. One plan, and up to 2 (P - 1) plays of it for each layer that moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from ..costs.context import PlanningContext
from ..machine.layout import unless_equal
from ..plan.limits import Limits
from ..plan.step_plan import Lengths, StepPlan
from ..planning.chain import PlanChain
from ..planning.judge import Candidate, best, judge
from ..recipe.recipe import Recipe
from ..recipe.stages import least_maximal

MOVES = 16
"""Layers that are moved at the most."""


def settled(
    recipe: Recipe, num_ranks: int, batch: Lengths, *, groups: Lengths | None = None, plays: bool = True
) -> Recipe:
    """The recipe with numbers in place of auto, for batches like this one, int64 [K] in tokens.

    ``groups``: of its samples (`PlanChain.of_groups`). ``plays``: neighbours of the first numbers too. Raises
    EvenloadError for a batch that cannot be planned.
    """
    if recipe.parallel.layers != "auto":
        return recipe
    first = _least(PlanChain.of_recipe(recipe, recipe.layout(num_ranks)).context, batch, recipe)
    numbered = recipe.changed({"parallel.layers": list(first)})
    if not plays:
        return numbered
    chain = PlanChain.of_recipe(numbered, numbered.layout(num_ranks)).of_groups(groups)
    return recipe.changed({"parallel.layers": list(_played(chain.plan(batch), chain.context, first))})


def _least(context: PlanningContext, batch: Lengths, recipe: Recipe) -> tuple[int, ...]:
    both, head, tokens = context.costs.both, context.head_frac, float(batch.sum())
    layers_s = (both.token_s * (1.0 - head) + both.expert_s) * tokens + both.pair_s * 0.5 * float(batch @ batch)
    num_layers = recipe.model.num_layers
    return least_maximal(num_layers, recipe.parallel.pp, num_layers * head * both.token_s * tokens / layers_s)


def _played(plan: StepPlan, context: PlanningContext, first: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers that end the step of a plan soonest, from these on."""
    chosen, known = first, {first: judge(plan, context)}
    for _ in range(MOVES):
        for layers in _neighbours(chosen):
            if layers not in known:
                known[layers] = _under(plan, context, layers)
        least = best([known[layers] for layers in (chosen, *_neighbours(chosen))])
        following = next(layers for layers in (chosen, *_neighbours(chosen)) if known[layers] is least)
        if following == chosen:
            break
        chosen = following
    return chosen


def _neighbours(layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for gives, takes in (pair for one in pairwise(range(len(layers))) for pair in (one, one[::-1])):
        if layers[gives] > 1:
            yield tuple(own + (stage == takes) - (stage == gives) for stage, own in enumerate(layers))


def _under(plan: StepPlan, context: PlanningContext, layers: tuple[int, ...]) -> Candidate:
    """What the plan comes to with so many layers in each stage; none has more recomputed than it has."""
    unequal = unless_equal(layers)
    limits: Limits = replace(plan.limits, layers=unequal, layers_per_stage=max(layers))
    again = (tuple(min(own, count) for count in row) for own, row in zip(layers, plan.recompute, strict=False))
    there = replace(context, layout=replace(context.layout, layers=unequal))
    return judge(plan.revised(limits=limits, recompute=tuple(again)), there)
