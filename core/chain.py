"""The chain of planners: every enabled plugin in order, each handing its plan to the next; none enabled is stock.

When a link of the chain fails, `simpler` offers what takes over: the chain with the plugins' simpler planners, and at
the end the stock plan, which cannot fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from .errors import EvenloadError, nearest
from .lanes import narrow, widen
from .layout import Layout
from .recipe import Recipe
from .registry import Plugin, PluginConfig, Situation
from .setting import limits_of, situation_of
from .simulate import simulate
from .stock import UNCAPPED, stock_plan
from .workload import Limits, Sequence, StepPlan

logger = logging.getLogger("evenload")

STOCK = "stock"
ALIASES = {"padded": STOCK}


@dataclass(frozen=True)
class PlanChain:
    """Everything but the batch. Pure: the same batch gives the same plan on every rank."""

    links: tuple[tuple[Plugin, PluginConfig], ...]
    situation: Situation
    limits: Limits
    micro_batch_size: int = 1
    instead: str = ""
    """A baseline that plans instead of the plugins, for comparison."""

    @classmethod
    def of_recipe(cls, recipe: Recipe, layout: Layout) -> PlanChain:
        """The chain a recipe asks for. Raises EvenloadError."""
        situation = situation_of(recipe, layout)
        links = tuple((plugin, recipe.config_of(plugin.name)) for plugin in recipe.enabled())
        return cls(links, situation, limits_of(recipe, situation), recipe.train.micro_batch_size)

    @classmethod
    def of_loop(cls, recipe: Recipe, layout: Layout, *, warn: bool = True, whole: bool = True) -> PlanChain:
        """The chain for a training loop that is not ours: one batch at a time, each sequence on one rank.

        Args:
            warn: say which settings of the recipe have no effect there.
            whole: sequences stay whole; else the loop runs slices in the order of a plan.

        Raises EvenloadError.
        """
        chain = cls.of_recipe(recipe, layout)
        wholly = "samples stay whole, each on one rank, none may be longer than a micro-batch, and none waits"
        for plugin, config in chain.links:
            idle = {
                key: getattr(config, key)
                for key, off in plugin.needs_host.items()
                if getattr(config, key) not in off and (whole or key not in plugin.needs_order)
            }
            if idle and warn:
                logger.warning(
                    "plugins.%s.%s has no effect in a training loop of your own: %s; `evenload train` honours it",
                    plugin.name,
                    ", ".join(f"{key}={value}" for key, value in idle.items()),
                    wholly if whole else "samples stay on one rank, and none waits",
                )
        return replace(chain, limits=replace(chain.limits, whole_sequences=whole))

    def stock(self, batch: tuple[Sequence, ...]) -> StepPlan:
        """What the trainer would do by itself."""
        if self._cp > 1:
            return widen(self._of_lanes().stock(batch), self.limits, self._cp)
        return stock_plan(batch, self.limits, self.micro_batch_size)

    def plan(self, batch: tuple[Sequence, ...]) -> StepPlan:
        """The checked plan of a batch. Raises EvenloadError, `PlanError` for a broken law among them."""
        if self._cp > 1:
            return self._best_of_lanes(batch)
        if self.instead:
            return self.baseline(self.instead, batch)
        placing = [place for place, (plugin, _) in enumerate(self.links) if plugin.places]
        plan = StepPlan(batch, (), self.limits) if 0 in placing else self.stock(batch)
        for place, (plugin, config) in enumerate(self.links):
            try:
                plan = plugin.plan(plan, self.situation, config)
            except EvenloadError:
                if place not in placing or place == placing[-1]:
                    raise
                # What one planner cannot place (a sequence over its cap), a later one may.
                plan = StepPlan(batch, (), config.capped(self.limits))
        return plan.check()

    def simpler(self, batch: tuple[Sequence, ...]) -> Iterator[tuple[str, Callable[[], StepPlan]]]:
        """(name, planner) of what takes over when `plan` fails or is late, from better to safer."""
        for plugin, _ in self.links:
            if plugin.simpler:
                name = plugin.simpler
                yield name, lambda name=name: self.baseline(name, batch)  # type: ignore[misc]
        yield STOCK, lambda: self.stock(batch).check()

    def baseline(self, name: str, batch: tuple[Sequence, ...]) -> StepPlan:
        """The checked plan of a named baseline: ``stock`` (or ``padded``), or one that an enabled plugin offers."""
        if self._cp > 1:
            return widen(self._of_lanes().baseline(name, batch), self.limits, self._cp).check()
        if ALIASES.get(name, name) == STOCK:
            return self.stock(batch).check()
        for plugin, config in self.links:
            if name in plugin.baselines:
                bare = StepPlan(batch, (), self.limits)
                return plugin.baselines[name](bare, self.situation, config).check()
        self.refuse_unknown_baseline(name)
        raise AssertionError(name)

    def refuse_unknown_baseline(self, name: str) -> None:
        """Raise EvenloadError unless `baseline` knows the name."""
        if ALIASES.get(name, name) not in (STOCK, *self.baseline_names):
            raise EvenloadError("there is no such baseline", repr(name), nearest(name, (STOCK, *self.baseline_names)))

    def _best_of_lanes(self, batch: tuple[Sequence, ...]) -> StepPlan:
        """Lanes are planned by compute alone; so a plan without cuts, whose prefixes travel once, is simulated beside.

        On a lane every slice moves the keys and values of its whole prefix, which compute may not hide.
        """
        lanes = self._of_lanes()
        uncut = replace(lanes, links=tuple((plugin, config.uncut()) for plugin, config in lanes.links))
        plans = [widen(lanes.plan(batch), self.limits, self._cp).check()]
        if plans[0].cut and not self.instead:
            with suppress(EvenloadError):  # a sequence that must be cut
                plans.append(widen(uncut.plan(batch), self.limits, self._cp).check())
        return min(plans, key=lambda plan: simulate(plan, self.situation, record=False).step_s)

    @property
    def _cp(self) -> int:
        return self.situation.layout.cp

    def _of_lanes(self) -> PlanChain:
        """The chain of a plane whose ranks are the lanes of static context parallelism."""
        limits, situation = narrow(self.limits, self.situation)
        links = tuple((plugin, config.on_lane(self._cp)) for plugin, config in self.links)
        return replace(self, links=links, limits=limits, situation=situation)

    @property
    def largest_slice(self) -> int:
        """Tokens of a sequence that the caps of all plugins allow in a micro-batch, on all ranks that may share it."""
        caps = [getattr(config, "max_tokens", None) for _, config in self.links]
        sharers = self.limits.num_ranks if any(plugin.shares for plugin, _ in self.links) else self._cp
        return sharers * min((cap for cap in caps if cap is not None), default=UNCAPPED)

    @property
    def baseline_names(self) -> tuple[str, ...]:
        """All baselines, the stock plan first."""
        return tuple(dict.fromkeys(["padded", *(name for plugin, _ in self.links for name in plugin.baselines)]))
