"""Planners as benchmarks ask for them: chains of recipes, what is changed of their costs, and batches of lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from evenload.api import load_plugins
from evenload.core.costs.context import PlanningContext
from evenload.core.plan.step_plan import Lengths, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import Recipe, parse
from evenload.data.lengths import read_lengths
from evenload.data.samples.cut import cut
from evenload.data.samples.order import SampleOrder

SEED = 1234
K = 1024


def recipe_of(fields: dict[str, Any]) -> Recipe:
    load_plugins()
    return parse(fields)


def chain_of(fields: dict[str, Any]) -> PlanChain:
    """The planners of a recipe. Raises EvenloadError for what it cannot ask for."""
    recipe = recipe_of(fields)
    return PlanChain.of_recipe(recipe, recipe.layout())


def plugins(max_tokens: int, *names: str, **settings: Any) -> dict[str, Any]:
    """Plugins that are on, under one cap, with the same further settings."""
    return {name: {"enabled": True, "max_tokens": max_tokens, **settings} for name in names}


def with_traffic(chain: PlanChain, **changes: Any) -> PlanChain:
    """The chain with other traffic."""
    return replace(chain, context=replace(chain.context, traffic=replace(chain.context.traffic, **changes)))


def without_sums(chain: PlanChain, **changes: Any) -> PlanChain:
    """The chain where gradients and weights travel for nothing: what is compared is compute."""
    return with_traffic(chain, gradient_bytes=0.0, weight_bytes=0.0, **changes)


def with_launches(context: PlanningContext, launch_s: Callable[[str, float], float]) -> PlanningContext:
    """Other launches of a forward and a backward, by the name of the pass and what it was."""
    costs = context.costs
    changed = {
        name: (cost := getattr(costs, name)).model_copy(update={"launch_s": launch_s(name, cost.launch_s)})
        for name in ("forward", "backward")
    }
    return replace(context, costs=costs.model_copy(update=changed))


def body_of(file: Path | None, count: int, longest: int) -> Lengths:
    """Lengths of a file, or of a heavy tail like that of web text (log-normal, median 1,100); long ones are split."""
    drawn = np.random.default_rng(SEED).lognormal(np.log(1100), 1.2, count).astype(np.int64)
    return cut(read_lengths(file) if file else drawn, longest, "split", 2).length


def batches(lengths: Lengths, size: int, count: int) -> Iterator[Lengths]:
    """Global batches as training draws them; samples repeat where there are too few."""
    lengths = np.tile(lengths, -(-size // len(lengths)))
    order = SampleOrder(len(lengths), SEED)
    for _ in range(count):
        drawn, order = order.take(size)
        yield as_lengths(lengths[drawn])
