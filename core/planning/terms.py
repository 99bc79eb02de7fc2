"""What a recipe asks of every plan of its batches, whoever makes it.

Caps on tokens and memory are promises. Of those of several plugins the least holds, and each plan that may run is held
to it, whatever the plan's own limits say.

Whose sequences are changes nothing of where and when they run. So tenants are written into a plan that is complete but
for them, whoever made it: a plugin, a baseline or the trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from ..balance.step_bound import passes_bound_s
from ..costs.context import PlanningContext
from ..errors import EvenloadError, PlanError
from ..laws import check
from ..plan.limits import Limits
from ..plan.rounds import in_rounds
from ..plan.step_plan import NO_GROUPS, Lengths, StepPlan, as_lengths
from ..registry import LayerPlugin, PluginConfig, SlicePlugin, StepPlugin
from ..simulate.v_shape import merged
from .judge import budget_bytes
from .stock import UNCAPPED


@dataclass(frozen=True)
class Terms:
    """Who plans a batch, for which machine, and what every plan of it must keep."""

    links: tuple[tuple[StepPlugin, PluginConfig], ...]
    context: PlanningContext
    limits: Limits
    micro_batch_size: int = 1
    of_layers: tuple[tuple[LayerPlugin, PluginConfig], ...] = ()
    """The planners of layers: each writes its policy into a plan that is complete but for it."""
    of_slices: tuple[tuple[SlicePlugin, PluginConfig], ...] = ()
    """The planners of slices: each orders those of the micro-batches of any plan, baselines too."""
    trees: bool = False
    """What samples begin with in common may be computed once."""
    groups: Lengths = field(default_factory=lambda: NO_GROUPS, compare=False)
    """Group of each sequence of the batch [S], where whoever asks says so; empty: as the settings say."""

    @property
    def caps(self) -> Limits:
        """The host's limits under the caps of all enabled plugins: what the recipe promises of every plan that runs."""
        return reduce(lambda limits, link: link[1].capped(limits), self.links, self.limits)

    @property
    def cp(self) -> int:
        return self.context.layout.cp

    @property
    def orders(self) -> bool:
        """Whether plans say themselves what is recomputed."""
        return any("orders" in plugin.decides for plugin, _ in self.links)

    @property
    def shares(self) -> bool:
        """Whether plans say how many ranks share a sequence."""
        return any("shares" in plugin.decides for plugin, _ in self.links)

    @property
    def largest_slice(self) -> int:
        """Tokens of a sequence that the caps of all plugins allow in a micro-batch, on all ranks that may share it."""
        caps = [getattr(config, "max_tokens", None) for _, config in self.links]
        sharers = self.limits.num_ranks if self.shares else self.cp
        return sharers * min((cap for cap in caps if cap is not None), default=UNCAPPED)

    def groups_in(self, batch: Lengths) -> Lengths:
        """The group of each sequence [S]: as somebody said, or so many neighbours as a setting says; empty: none."""
        size = max((getattr(config, "group_size", 0) for _, config in self.links), default=0)
        if size and len(self.groups):
            what = "two settings say which samples stay together"
            do = "set plugins.packing.group_size=0, or leave groups (data.group) out"
            raise EvenloadError(what, f"group_size {size}, and a group of each sample", do)
        return as_lengths(np.arange(len(batch)) // size) if size else self.groups

    def work_s(self, batch: Lengths) -> float:
        """About how long the plugins plan a batch [s]: counted, the same on every rank."""
        sizes = len(batch), self.limits.num_ranks, self.limits.num_stages
        return sum(p.estimates.work_s(*sizes) for p, _ in self.links if p.estimates.work_s)

    def passes_bound_s(self, batch: Lengths, *, fits: bool = False) -> float:
        """No plan of a batch has run its last pass before [s]; ``fits``: none that fits into the device."""
        caps, context = self.caps, self.context
        room_bytes = budget_bytes(caps, context) if fits else math.inf
        return passes_bound_s(batch, caps, context, shares=self.shares, orders=self.orders, room_bytes=room_bytes)

    def breaks(self, plan: StepPlan) -> str:
        """Which setting of a plugin a plan on its way does not keep; empty where it keeps all."""
        asked = ((plugin.baselines.breaks, config) for plugin, config in self.links)
        return next((broken for breaks, config in asked if breaks and (broken := breaks(plan, config))), "")

    def under_caps(self, plan: StepPlan) -> StepPlan:
        """The plan, checked under the caps of the recipe, whatever its planner allowed itself. Raises PlanError."""
        plan = plan.revised(limits=plan.limits.held_to(self.caps), groups=self.groups_in(plan.lengths))
        plan = merged(in_rounds(plan)).rounded()
        if plan.limits.largest_first and plan.is_sortable:
            plan = plan.revised(micro_batches=tuple(sorted(plan.micro_batches, key=lambda m: -m.num_padded_tokens)))
        return check(plan)

    def owned(self, plan: StepPlan, tenants: Lengths | None) -> StepPlan:
        """The plan with tenants [S] and slices as planners of slices order them, not yet checked; None: as it is.

        Raises PlanError where tenants are not one for each sequence.
        """
        if tenants is None:
            return plan
        if len(tenants) != len(plan.lengths):
            what, do = "a batch has not one tenant for each sequence", "give the number of each one's tenant"
            raise PlanError(what, f"{len(tenants)} tenants, {len(plan.lengths)} sequences", do)
        owned = plan.revised(tenants=as_lengths(tenants))
        for plugin, config in self.of_slices:
            owned = plugin.plan(owned, self.context, config)
        return owned

    def with_tenants(self, plan: StepPlan, tenants: Lengths | None) -> StepPlan:
        """A checked plan with its tenants, checked again where planners of slices had a say."""
        owned = self.owned(plan, tenants)
        return check(owned) if tenants is not None and self.of_slices else owned
