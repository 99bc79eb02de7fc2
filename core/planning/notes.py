"""What notes of a plan tell of it that a run warns of, each reason once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..plan.limits import Limits
from ..plan.step_plan import StepPlan
from ..recipe.recipe import Recipe
from ..registry import Plugin, PluginConfig

logger = logging.getLogger("evenload")

LEFT_OUT, LEAST_CAP = "left out of this plan: ", "the least max_tokens of all plugins holds: "
NO_EFFECT = "without effect: "
WARNINGS = LEFT_OUT, LEAST_CAP, NO_EFFECT
"""What notes begin with that tell of a plugin which refused the batch while another one could plan it, of unlike caps,
and of a planner of layers that has nothing to plan."""


def warn_once(plan: StepPlan, warned: set[str]) -> None:
    """Warn of what a plan leaves out, but of reasons in ``warned``, to which they are added."""
    for note in (note for note in plan.notes if note.startswith(WARNINGS)):
        reason = note.partition(" (")[0]
        if reason not in warned:
            warned.add(reason)
            logger.warning("%s", note)


def unequal_caps(links: Iterable[tuple[Plugin, PluginConfig]], limits: Limits) -> list[str]:
    """The note of plugins whose token caps differ; none where they do not."""
    caps = ((plugin.name, config.capped(limits).max_tokens) for plugin, config in links)
    own = {name: tokens for name, tokens in caps if tokens < limits.max_tokens}
    differ = len(set(own.values())) > 1
    return [LEAST_CAP + ", ".join(f"{name} {tokens}" for name, tokens in own.items())] if differ else []


def warn_of_no_trees(recipe: Recipe, why: str) -> None:
    """Warn of a recipe that asks for trees where none is in the first planned step."""
    if recipe.trees_asked:
        logger.warning("%s has no effect in the first step: %s", recipe.trees_asked, why)


def warn_of_sparse(recipe: Recipe) -> None:
    """Warn of sparse scoring in a training loop that is not ours, which evaluates by itself."""
    if recipe.sparse.is_on:
        logger.warning("sparse has no effect in a training loop of your own: what it scores is dense")


def warn_of_idle(links: Iterable[tuple[Plugin, PluginConfig]], *, whole: bool, orders: bool) -> None:
    """Warn of settings without effect in a training loop that is not ours; `PlanChain.of_model` has the arguments."""
    wholly = "samples stay whole, each on one rank, none may be longer than a micro-batch, and none waits"
    slices = "no sample waits for another step there" + ("" if orders else ", and nothing is replayed or in stages")
    for plugin, config in links:
        replays = {} if orders else plugin.needs.replays
        idle = {
            key: getattr(config, key)
            for key, off in plugin.needs.host.items()
            if getattr(config, key) not in off and (whole or key in replays or key not in plugin.needs.order)
        }
        idle |= {"enabled": True} if "orders" in plugin.decides and not orders else {}
        if idle:
            logger.warning(
                "plugins.%s.%s has no effect in a training loop of your own: %s",
                plugin.name,
                ", ".join(f"{key}={value}" for key, value in idle.items()),
                wholly if whole else f"{slices}; `evenload train` does it",
            )
