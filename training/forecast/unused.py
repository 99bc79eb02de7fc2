"""Plugins that a recipe leaves off, planned for the same batches: what each would gain, and the line that adds it.

One is planned where a loop of the recipe's trainer runs it and a step takes no more than `BUDGET_S` of planning, as
counted (`Plugin.work_s`), and in as many steps as these seconds suffice for. What several gain together is planned too.
Planners of layers gain what no length tells.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...core import registry
from ...core.errors import EvenloadError
from ...core.input.format import to_json
from ...core.planning.chain import PlanChain
from ...core.planning.gains import NOTHING
from ...core.recipe.recipe import Recipe
from ...core.recipe.traits import NOTHING as DOES_NOTHING
from ...core.recipe.traits import REFUSED, trainer_called
from ...core.registry import Plugin, StepPlugin
from .forecast import Forecast, Simulated, Unused, simulated

BUDGET_S = 5.0
"""Of planning, for each; the step that is begun within it is planned to its end."""


def with_unused(forecast: Forecast) -> Forecast:
    """The forecast with what plugins that are off would gain in its steps; of tenants and groups nothing is asked."""
    if forecast.tenants or len(forecast.steps[0].ours.plan.groups):
        return forecast
    alone = [
        one for plugin in _off(forecast.recipe, forecast.chain.limits.num_stages) for one in _tried(forecast, [plugin])
    ]
    gaining = [one for one in alone if one.gain > 1 + NOTHING]
    both = [registry.get(name) for one in gaining for name in one.plugins]
    together = list(_tried(forecast, both)) if len(both) > 1 else []
    best = max((one.gain for one in alone), default=0.0) * (1 + NOTHING)
    return replace(forecast, unused=(*alone, *(one for one in together if one.gain > best)))


def _off(recipe: Recipe, num_stages: int) -> list[StepPlugin]:
    """Planners of steps that are off and would do something."""
    loops = trainer_called(recipe.trainer).loops
    return [
        plugin
        for plugin in registry.registered()
        if isinstance(plugin, StepPlugin) and plugin not in recipe.enabled()
        if num_stages > 1 or "orders" not in plugin.decides
        if any(loop.does(plugin) not in (DOES_NOTHING, REFUSED) for loop in loops)
    ]


def _tried(forecast: Forecast, plugins: Sequence[Plugin]) -> Iterator[Unused]:
    """What plugins would gain; nothing where the recipe cannot have them."""
    steps, context = forecast.steps, forecast.chain.context
    sections = {plugin.name: _section(forecast.recipe, plugin) for plugin in plugins}
    changes = {f"plugins.{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()}
    names, line = tuple(sections), "\n".join(f"{name}: {_as_yaml(keys)}" for name, keys in sections.items())
    try:
        chain = PlanChain.of_recipe(forecast.recipe.changed(changes), context.layout)
        if chain.work_s(steps[0].ours.plan.lengths) > BUDGET_S:
            yield Unused(names, line)
            return
        begin, plans = time.perf_counter(), list[Simulated]()
        for step in steps:
            if time.perf_counter() - begin < BUDGET_S:
                plans.append(simulated(chain.plan(step.ours.plan.lengths), chain))
    except EvenloadError:
        return
    plan_s = (time.perf_counter() - begin) / len(plans)
    most_bytes = max([context.cluster.memory_bytes, *(step.ours.peak_bytes for step in steps)])
    if max(one.peak_bytes for one in plans) <= most_bytes:
        ours_s = sum(step.ours.outcome.step_s for step in steps[: len(plans)])
        yield Unused(names, line, ours_s / sum(one.outcome.step_s for one in plans), plan_s)


def _section(recipe: Recipe, plugin: Plugin) -> dict[str, Any]:
    """The settings that switch a plugin on under the token cap of those that are on."""
    caps = [getattr(recipe.config_of(one.name), "max_tokens", None) for one in recipe.enabled()]
    cap = min((cap for cap in caps if cap is not None), default=None)
    capped = cap is not None and "max_tokens" in plugin.config.model_fields
    return {"enabled": True, **({"max_tokens": cap} if capped else {})}


def _as_yaml(keys: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {to_json(value)}" for key, value in keys.items()) + "}"
