"""What planners of layers write into a plan that is complete but for it: where experts may run in its layers."""

from __future__ import annotations

from typing import NamedTuple

from ..costs.context import PlanningContext
from ..laws import check_policy
from ..plan.step_plan import StepPlan
from ..registry import LayerPlugin, PluginConfig
from .notes import NO_EFFECT


class LayerPolicies(NamedTuple):
    """The planners of layers of a recipe, and what they know of its experts."""

    links: tuple[tuple[LayerPlugin, PluginConfig], ...]
    context: PlanningContext
    instead: str = ""
    """A baseline that plans instead of the plugins, of these or of others."""

    @property
    def idle(self) -> str:
        """Why there is nothing to plan; empty where there is."""
        if self.context.experts is None:
            return "as the model has no experts"
        return "as every rank has all experts: parallel.ep is 1" if self.context.layout.ep == 1 else ""

    @property
    def need_loads(self) -> bool:
        """Whether policies depend on the loads of experts in earlier steps."""
        return not self.idle and any(
            plugin.needs_loads(config, self.instead if self.instead in plugin.baselines.rows else "")
            for plugin, config in self.links
            if plugin.needs_loads
        )

    def written(self, plan: StepPlan) -> StepPlan:
        """The plan with the policies of all. Raises PlanError for one that breaks a law."""
        for plugin, config in self.links:
            plan = plugin.plan(plan, self.context, config)
            check_policy(plan)
        notes = [f"{NO_EFFECT}plugins.{plugin.name}, {self.idle}" for plugin, _ in self.links if self.idle]
        return plan.revised(notes=(*plan.notes, *notes)) if notes else plan

    def of_baseline(self, name: str, plan: StepPlan) -> StepPlan:
        """The plan with the policy of a baseline that is offered. Raises PlanError for one that breaks a law."""
        plugin, config = next(link for link in self.links if name in link[0].baselines.rows)
        plan = plugin.baselines.rows[name].plan(plan, self.context, config)
        check_policy(plan)
        return plan
