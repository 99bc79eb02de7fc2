"""Baselines: what others would make of a batch, shown for comparison, and run where they are lawful and faster.

They may exceed the caps, and then say so in their limits. One that keeps the caps and the settings is a candidate too:
no plan is slower than a lawful row of its own table. Where the plugins fail or are late, `Rivals.rules` say what may
take over: their simpler planners and at the end the stock plan.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from ..errors import EvenloadError, nearest
from ..laws import check
from ..plan.step_plan import NO_GROUPS, Lengths, StepPlan
from ..registry import LayerPlugin, PluginConfig, Prunable, StepPlugin
from .judge import Candidate, at_bound, floor_s, judge, least_s, rivals_of
from .notes import WARNINGS
from .static_cp import folded, unfold_cp
from .stock import stock_plan
from .terms import Terms

STOCK = "stock"
SAID = 0.01
"""Share of a step by which a simple rule is faster where it is worth a word."""


class Rivals(NamedTuple):
    """The baselines that the plugins of a recipe offer, and the stock plan."""

    terms: Terms

    @property
    def names(self) -> tuple[str, ...]:
        """All baselines, the stock plan first."""
        links = (*self.terms.links, *self.terms.of_layers)
        return tuple(dict.fromkeys(["padded", *(name for plugin, _ in links for name in plugin.baselines.rows)]))

    @property
    def quick(self) -> tuple[str, ...]:
        """Baselines of plugins that plan quickly."""
        return tuple(dict.fromkeys(name for plugin, _ in self.terms.links for name in plugin.baselines.quick))

    @property
    def rules(self) -> tuple[str, ...]:
        """Baselines that may run where the plugins fail or are late: quick ones, and from better to safer."""
        simpler = (plugin.baselines.simpler for plugin, _ in self.terms.links)
        return tuple(dict.fromkeys((*self.quick, *filter(None, simpler), STOCK)))

    def of_batch(self, batch: Lengths, purpose: Literal["shown", "tried"]) -> tuple[str, ...]:
        """Baselines that are planned for a batch of this size; none of layers, whose loads lengths do not tell."""
        size, padded = len(batch) * self.terms.limits.num_ranks, self.terms.caps.padded
        rows = {name: row for plugin, _ in reversed(self.terms.links) for name, row in plugin.baselines.rows.items()}

        def planned(name: str) -> bool:
            if (row := rows.get(name)) is None:
                return self.offer(name) is None
            fits = row.sizes is None or size <= getattr(row.sizes, purpose)
            return fits and (purpose == "shown" or row.padded == padded)

        return tuple(filter(planned, self.names))

    def offer(self, name: str) -> tuple[StepPlugin | LayerPlugin, PluginConfig] | None:
        """The first plugin that offers a baseline; None for the stock plan. Raises EvenloadError."""
        if name in (STOCK, "padded"):
            return None
        if name not in self.names:
            raise EvenloadError("there is no such baseline", repr(name), nearest(name, (STOCK, *self.names)))
        links: tuple[tuple[StepPlugin | LayerPlugin, PluginConfig], ...] = (*self.terms.links, *self.terms.of_layers)
        return next(link for link in links if name in link[0].baselines.rows)

    def full_name(self, name: str) -> str:
        """A baseline's name together with that of the plugin that offers it."""
        offer = self.offer(name)
        return f"{offer[0].name}.{name}" if offer else name

    def breaks(self, name: str, plan: StepPlan) -> str:
        """Which setting of its plugin a baseline's plan does not keep; empty where it keeps all."""
        offer = self.offer(name)
        breaks = offer and offer[0].baselines.breaks
        return breaks(plan, offer[1]) if offer and breaks else ""

    def least_s(self, name: str, batch: Lengths) -> float:
        """A baseline of the batch that may run takes no less [s]; asked before it plans."""
        offer, terms = self.offer(name), self.terms
        keeps = offer[0].baselines.rows[name].keeps if offer else "whole"
        return least_s(None if terms.cp > 1 else keeps, batch, terms.caps, terms.context, orders=terms.orders)

    def planned(self, name: str, batch: Lengths) -> StepPlan:
        """The plan of a baseline that is not one of layers, under limits of its own; laws are the caller's to check."""
        terms = self.terms
        if terms.cp > 1:
            return unfold_cp(Rivals(folded(terms)).planned(name, batch), terms.limits, terms.cp)
        if (offer := self.offer(name)) is None:
            return stock_plan(batch, terms.limits, terms.micro_batch_size)
        incoming = StepPlan(batch, (), terms.caps, groups=terms.groups_in(batch))
        plan = offer[0].baselines.rows[name].plan(incoming, terms.context, offer[1])
        free = replace(plan.limits, max_activation_bytes=math.inf, equal_size=False)
        return plan.revised(limits=free, groups=NO_GROUPS)

    def fastest(self, plan: StepPlan) -> StepPlan:
        """The plan, or the fastest baseline of its batch that keeps its caps and the settings, where that is faster.

        None is planned where the plan is at its certified bound, or a large batch's next to it (`judge.at_bound`). One
        that cannot win by its bound is not planned (`Baseline.keeps`), one whose busiest rank takes longer is not
        played (`judge.floor_s`), and one that takes long to plan is left out of large batches (`Baseline.sizes`).
        """
        ours = fastest = judge(plan, self.terms.context)
        if at_bound(plan, self.terms.context):
            return plan
        for name in self.of_batch(plan.lengths, "tried"):
            with suppress(EvenloadError):
                if self.full_name(name) not in rivals_of(plan):
                    fastest = self._faster(name, fastest, ours)
        if fastest is ours:
            return plan
        notes = list(fastest.plan.notes)
        if ours.step_s > (1 + SAID) * fastest.step_s:
            times = f"predicted {fastest.step_s:.4g} s, {plan.made_by} would take {ours.step_s:.4g} s"
            notes.append(f"the simple rule '{fastest.baseline}' plans this batch: {times}")
        warnings = (note for note in plan.notes if note.startswith(WARNINGS))
        return fastest.plan.revised(bound_s=plan.bound_s, notes=(*notes, *warnings))

    def _faster(self, name: str, fastest: Candidate, ours: Candidate) -> Candidate:
        """A baseline if it is lawful and faster, else the fastest so far. Raises EvenloadError where it cannot plan."""
        limits, context = ours.plan.limits, self.terms.context
        plan = self._below(name, ours.plan, fastest.step_s)
        if plan is None:
            return fastest
        over = max((-(-m.num_padded_tokens // len(m.ranks)) for m in plan.micro_batches), default=0) > limits.max_tokens
        if over or self.breaks(name, plan) or floor_s(plan, context) >= fastest.step_s:
            return fastest
        candidate = judge(plan.revised(limits=limits, groups=ours.plan.groups), context, name)
        small = candidate.fits or candidate.peak_bytes <= ours.peak_bytes
        if not small or candidate.step_s >= fastest.step_s:
            return fastest
        return candidate._replace(plan=check(candidate.plan))

    def _below(self, name: str, ours: StepPlan, bar_s: float) -> StepPlan | None:
        """The plan of a baseline; None where it is known before it is made to take no less than ``bar_s``."""
        offer = self.offer(name)
        if self.least_s(name, ours.lengths) >= bar_s:
            return None
        baseline: Any = offer and offer[0].baselines.rows[name].plan
        if offer and self.terms.cp == 1 and isinstance(baseline, Prunable):
            return baseline.below(StepPlan(ours.lengths, (), ours.limits), self.terms.context, offer[1], bar_s)
        return self.planned(name, ours.lengths)
