"""The chain of planners: every enabled plugin in order, each handing its plan to the next; none enabled is stock.

Caps on tokens and memory are promises. Of those of several plugins the least holds, and the chain holds every plan that
may run to it, whatever the plan's own limits say. Where the chain fails or is late, `rules` say what may take over: the
plugins' simpler planners and at the end the stock plan, each only where it keeps the caps and the settings (`stages`).

Baselines are for comparison. They may exceed the caps, and then say so in their limits. One that keeps the caps and the
settings is a candidate too (`PlanChain.plan`): no plan is slower than a lawful row of its own table.

Whose sequences are changes nothing of where and when they run. So tenants are written into a plan that is complete but
for them, whoever made it: a plugin, a baseline or the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal

from ..balance.step_bound import passes_bound_s
from ..costs.context import PlanningContext
from ..errors import EvenloadError, nearest, of_request, refuse_first
from ..experts.history import Loads
from ..laws import check, check_policy
from ..machine.layout import Layout
from ..machine.shape import Shape
from ..plan.limits import Limits
from ..plan.rounds import in_rounds
from ..plan.step_plan import NO_GROUPS, Lengths, StepPlan, as_lengths
from ..recipe.recipe import Recipe
from ..recipe.rules import refuse_in_loops
from ..recipe.traits import TrainerTraits
from ..registry import Baseline, LayerPlugin, PluginConfig, Prunable, SlicePlugin, StepPlugin
from ..simulate.v_shape import merged
from .judge import Candidate, at_bound, beside, budget_bytes, floor_s, judge, least_s, outcome_of, rivals_of
from .notes import LEFT_OUT, NO_EFFECT, WARNINGS, unequal_caps, warn_of_idle
from .setting import Setting, context_of, groups_of, limits_of, refuse_others, refuse_too_many
from .static_cp import best_folded, folded, unfold_cp
from .stock import UNCAPPED, stock_plan
from .tenants import of_tenants

STOCK = "stock"
ALIASES = {"padded": STOCK}
SAID = 0.01
"""Share of a step by which a simple rule is faster where it is worth a word."""


@dataclass(frozen=True)
class PlanChain:
    """Everything but the batch. Pure: the same batch gives the same plan on every rank."""

    links: tuple[tuple[StepPlugin, PluginConfig], ...]
    context: PlanningContext
    limits: Limits
    micro_batch_size: int = 1
    instead: str = ""
    """A baseline that plans instead of the plugins, for comparison."""
    of_layers: tuple[tuple[LayerPlugin, PluginConfig], ...] = ()
    """The planners of layers: each writes its policy into a plan that is complete but for it."""
    of_slices: tuple[tuple[SlicePlugin, PluginConfig], ...] = ()
    """The planners of slices: each orders those of the micro-batches of any plan, baselines too."""
    groups: Lengths = field(default_factory=lambda: NO_GROUPS, compare=False)
    """Group of each sequence of the batch [S], where whoever asks says so; empty: as the settings say."""

    @classmethod
    def of_recipe(cls, recipe: Recipe, layout: Layout) -> PlanChain:
        """The chain a recipe asks for. Raises EvenloadError."""
        return cls._of_setting(recipe, Setting.of_recipe(recipe), layout)

    @classmethod
    def _of_setting(cls, recipe: Recipe, setting: Setting, layout: Layout) -> PlanChain:
        context = context_of(setting, layout)
        return cls(
            tuple((one, recipe.config_of(one.name)) for one in recipe.enabled_of(StepPlugin)),
            context,
            limits_of(setting, context),
            recipe.train.micro_batch_size,
            of_layers=tuple((one, recipe.config_of(one.name)) for one in recipe.enabled_of(LayerPlugin)),
            of_slices=tuple((one, recipe.config_of(one.name)) for one in recipe.enabled_of(SlicePlugin)),
        )

    @classmethod
    def of_model(
        cls,
        recipe: Recipe,
        shape: Shape,
        layout: Layout,
        traits: TrainerTraits,
        *,
        warn: bool = True,
        whole: bool = True,
        orders: bool = True,
    ) -> PlanChain:
        """The chain for a live model in a training loop that is not ours: one batch at a time.

        ``warn``: say which settings of the recipe have no effect there. ``whole``: sequences stay whole, each on one
        rank; else the loop runs slices, and its ranks share them. ``orders``: in the order of a plan, with replays and
        over pipeline stages. Raises EvenloadError; `RequestError` for what is wrong in the recipe, whatever the model.
        """
        with of_request():
            refuse_in_loops(recipe)
            refuse_first(
                (
                    recipe.sharded_experts,
                    "experts of a training loop of your own stay whole, where its model has them",
                    "plugins.moe.owners sharded",
                    "set plugins.moe.owners=home, or train with `evenload train`",
                )
            )
            setting = Setting.of_recipe(recipe, shape, traits)
        chain = cls._of_setting(recipe, setting, layout)
        if warn:
            warn_of_idle(chain.links, whole=whole, orders=orders)
        if not orders:
            running = [(p, c) for p, c in chain.links if "orders" not in p.decides]
            links = tuple((p, c.model_copy(update=p.needs.replays)) for p, c in running)
            chain = replace(chain, links=links)
        return replace(chain, limits=replace(chain.limits, whole_sequences=whole))

    def of_groups(self, groups: Any) -> PlanChain:
        """This chain for a batch in which samples of one number stay together, integers [S]; None: as settings say."""
        return self if groups is None else replace(self, groups=as_lengths(groups))

    def with_beside(self, seconds: Iterable[tuple[float, float]]) -> PlanChain:
        """This chain for a batch whose sequences take so many seconds beside their tokens (`Costs.beside`)."""
        costs = self.context.costs.model_copy(update={"beside": tuple(seconds)})
        return replace(self, context=replace(self.context, costs=costs))

    def in_rows(self, count: int = 1) -> PlanChain:
        """The chain where the model keeps apart only what stands in rows of its own, ``count`` of which are a sequence
        of the plan. Raises EvenloadError where no enabled plugin plans padded groups."""
        rows = [(plugin, config.in_rows(count)) for plugin, config in self.links if "places" in plugin.decides]
        links = tuple((plugin, config) for plugin, config in rows if config is not None)
        if not links:
            raise EvenloadError(
                "the model runs no packs, and nothing plans padded groups of single samples",
                f"enabled are {', '.join(plugin.name for plugin, _ in self.links) or 'none'}",
                "enable plugins.packing, without group_size and equal_size",
            )
        return replace(self, links=links)

    def stock(self, batch: Lengths, tenants: Lengths | None = None) -> StepPlan:
        """What the trainer would do by itself."""
        return of_tenants(self._baseline(STOCK, batch), tenants, self.context, self.of_slices)

    def plan(self, batch: Lengths, tenants: Lengths | None = None) -> StepPlan:
        """The checked plan of a batch. Raises EvenloadError, `PlanError` for a broken law among them.

        ``tenants``: number of each sequence's tenant [S]; None: there are none.
        """
        return self.with_tenants(self._planned(batch), tenants)

    def with_tenants(self, plan: StepPlan, tenants: Lengths | None) -> StepPlan:
        """A checked plan with its tenants, checked again where planners of slices had a say."""
        owned = of_tenants(plan, tenants, self.context, self.of_slices)
        return check(owned) if tenants is not None and self.of_slices else owned

    def _planned(self, batch: Lengths) -> StepPlan:
        """The checked plan of a batch, whoever's its sequences are."""
        if self.instead:
            return self._checked_baseline(self.instead, batch)
        *_, plan = self.in_turn(batch)
        return self.finished(plan)

    @property
    def staged(self) -> bool:
        """Whether there is a plan to be had on the way to that of `plan`."""
        return bool(self.links) and not self.instead

    def finished(self, plan: StepPlan, known: Iterable[Candidate] = ()) -> StepPlan:
        """The plan of all plugins under the caps, baselines weighed. Raises PlanError.

        ``known``: baselines of the batch that have been judged.
        """
        notes = unequal_caps(self.links, self.limits)
        plan = self._bounded(self.under_caps(plan.revised(notes=(*plan.notes, *notes)) if notes else plan))
        if slower := [one.baseline for one in known if one.step_s >= outcome_of(plan, self.context).step_s]:
            plan = beside(plan, map(self._rival, slower))
        return self.with_policy(self._no_slower_than_baselines(plan) if self.links else plan)

    def _bounded(self, plan: StepPlan) -> StepPlan:
        """With what no plan of these settings ends its passes before. Where it fits, only those that do are meant; a
        planner that lets ranks share sequences has a bound of its own, of the costs as they are."""
        if not self.links or self.cp > 1:
            return plan
        context, caps = self.context, self.caps
        fits = judge(plan, context).fits
        own_s = passes_bound_s(
            plan.lengths,
            caps,
            context,
            shares=self.shares,
            orders=self.orders,
            room_bytes=budget_bytes(caps, context) if fits else math.inf,
        )
        known_s = 0.0 if self.orders and context.costs.recompute else plan.bound_s
        return plan.revised(bound_s=max(own_s, known_s))

    @property
    def orders(self) -> bool:
        """Whether plans say themselves what is recomputed."""
        return any("orders" in plugin.decides for plugin, _ in self.links)

    @property
    def shares(self) -> bool:
        """Whether plans say how many ranks share a sequence."""
        return any("shares" in plugin.decides for plugin, _ in self.links)

    def lawful(self, plan: StepPlan) -> StepPlan:
        """A plan on its way through the plugins, where it may run as it is. Raises EvenloadError where it may not."""
        for plugin, config in self.links:
            if (breaks := plugin.baselines.breaks) and (broken := breaks(plan, config)):
                raise EvenloadError("this plan does not keep the settings of the recipe", broken, "see the recipe")
        return self.under_caps(plan)

    def with_policy(self, plan: StepPlan) -> StepPlan:
        """The plan with what planners of layers say of it. Raises PlanError for a policy that breaks a law."""
        for plugin, config in self.of_layers:
            plan = plugin.plan(plan, self.context, config)
            check_policy(plan)
        if idle := self._idle_in_layers:
            plan = plan.revised(
                notes=(*plan.notes, *(f"{NO_EFFECT}plugins.{p.name}, {idle}" for p, _ in self.of_layers))
            )
        return plan

    @property
    def _idle_in_layers(self) -> str:
        """Why planners of layers have nothing to plan; empty where they have."""
        if self.context.experts is None:
            return "as the model has no experts"
        return "as every rank has all experts: parallel.ep is 1" if self.context.layout.ep == 1 else ""

    def in_turn(self, batch: Lengths) -> Iterator[StepPlan]:
        """The plan after each plugin in turn, last that of all; not yet under the caps. Raises EvenloadError."""
        refuse_too_many(batch, self.caps, self.cp)
        return iter([best_folded(self, batch)]) if self.cp > 1 else self.chained(batch)

    def chained(self, batch: Lengths) -> Iterator[StepPlan]:
        placing = [place for place, (plugin, _) in enumerate(self.links) if "places" in plugin.decides]
        limits = replace(self.limits, max_tokens=self.caps.max_tokens)
        groups = groups_of(batch, self.groups, self.links)
        refuse_others(len(groups) > 0 or self.caps.equal_size, self.caps.padded, (*self.links, *self.of_slices))
        plan = StepPlan(batch, (), limits, groups=groups) if 0 in placing else self._baseline(STOCK, batch)
        notes: list[str] = []
        for place, (plugin, config) in enumerate(self.links):
            try:
                plan = signed(plugin.name, plan, plugin.plan(plan, self.context, config))
            except EvenloadError as error:
                if place not in placing or place == placing[-1]:
                    raise
                # What one planner cannot place (a sequence over its cap), a later one may.
                notes.append(f"{LEFT_OUT}{plugin.name}: {error.what} ({error.found})")
                plan = replace(plan, limits=config.capped(plan.limits))
            except Exception as error:
                error.add_note(f"raised by the plugin '{plugin.name}' while it planned")
                raise
            if place < len(self.links) - 1 and plan.micro_batches:
                yield plan
        yield plan.revised(notes=(*plan.notes, *notes)) if notes else plan

    def work_s(self, batch: Lengths) -> float:
        """About how long the plugins plan a batch [s]: counted, the same on every rank."""
        sizes = len(batch), self.limits.num_ranks, self.limits.num_stages
        return sum(p.estimates.work_s(*sizes) for p, _ in self.links if p.estimates.work_s)

    @property
    def rules(self) -> tuple[str, ...]:
        """Baselines that may run where `plan` fails or is late: quick ones, and from better to safer."""
        return tuple(dict.fromkeys((*self.quick, *filter(None, (p.baselines.simpler for p, _ in self.links)), STOCK)))

    @property
    def quick(self) -> tuple[str, ...]:
        """Baselines of the plugins that plan quickly."""
        return tuple(dict.fromkeys(name for plugin, _ in self.links for name in plugin.baselines.quick))

    def baseline(self, name: str, batch: Lengths, tenants: Lengths | None = None) -> StepPlan:
        """The plan of a named baseline: ``stock`` (or ``padded``), or one that an enabled plugin offers.

        It is checked under limits of its own, which may exceed the caps of the recipe.
        """
        return self.with_tenants(self._checked_baseline(name, batch), tenants)

    def _checked_baseline(self, name: str, batch: Lengths) -> StepPlan:
        if (offer := self.offer(name)) in self.of_layers and offer is not None:
            plan = offer[0].baselines.rows[name].plan(replace(self, instead="")._planned(batch), self.context, offer[1])
            check_policy(plan)
            return plan
        return check(merged(in_rounds(self._baseline(name, batch))))

    def _baseline(self, name: str, batch: Lengths) -> StepPlan:
        if self.cp > 1:
            return unfold_cp(folded(self)._baseline(name, batch), self.limits, self.cp)
        if (offer := self.offer(name)) is None:
            return stock_plan(batch, self.limits, self.micro_batch_size)
        incoming = StepPlan(batch, (), self.caps, groups=groups_of(batch, self.groups, self.links))
        plan = offer[0].baselines.rows[name].plan(incoming, self.context, offer[1])
        free = replace(plan.limits, max_activation_bytes=math.inf, equal_size=False)
        return plan.revised(limits=free, groups=NO_GROUPS)

    def _no_slower_than_baselines(self, plan: StepPlan) -> StepPlan:
        """The plan, or the fastest baseline of its batch that keeps its caps and the settings, where that is faster.

        None is planned where the plan is at its certified bound, or a large batch's next to it (`judge.at_bound`). One
        that cannot win by its bound is not planned (`Baseline.keeps`), one whose busiest rank takes longer is not
        played (`judge.floor_s`), and one that takes long to plan is left out of large batches (`Baseline.sizes`).
        """
        ours = fastest = judge(plan, self.context)
        if at_bound(plan, self.context):
            return plan
        for name in self.baselines_for(plan.lengths, "tried"):
            with suppress(EvenloadError):
                if self._rival(name) not in rivals_of(plan):
                    fastest = self._faster(name, fastest, ours)
        if fastest is ours:
            return plan
        warnings = [note for note in plan.notes if note.startswith(WARNINGS)]
        notes = (*fastest.plan.notes, *warnings)
        if ours.step_s > (1 + SAID) * fastest.step_s:
            times = f"predicted {fastest.step_s:.4g} s, {plan.made_by} would take {ours.step_s:.4g} s"
            notes = (*fastest.plan.notes, f"the simple rule '{fastest.baseline}' plans this batch: {times}", *warnings)
        return fastest.plan.revised(bound_s=plan.bound_s, notes=notes)

    def _faster(self, name: str, fastest: Candidate, ours: Candidate) -> Candidate:
        """A baseline if it is lawful and faster, else the fastest so far. Raises EvenloadError where it cannot plan."""
        limits = ours.plan.limits
        plan = self._baseline_below(name, ours.plan, fastest.step_s)
        if plan is None:
            return fastest
        over = max((-(-m.num_padded_tokens // len(m.ranks)) for m in plan.micro_batches), default=0) > limits.max_tokens
        if over or self.breaks(name, plan) or floor_s(plan, self.context) >= fastest.step_s:
            return fastest
        candidate = judge(plan.revised(limits=limits, groups=ours.plan.groups), self.context, name)
        small = candidate.fits or candidate.peak_bytes <= ours.peak_bytes
        if not small or candidate.step_s >= fastest.step_s:
            return fastest
        return candidate._replace(plan=check(candidate.plan))

    def _baseline_below(self, name: str, ours: StepPlan, bar_s: float) -> StepPlan | None:
        """The plan of a baseline; None where it is known before it is made to take no less than ``bar_s``."""
        offer = self.offer(name)
        if self.least_s(name, ours.lengths) >= bar_s:
            return None
        baseline: Any = offer and offer[0].baselines.rows[name].plan
        if offer and self.cp == 1 and isinstance(baseline, Prunable):
            return baseline.below(StepPlan(ours.lengths, (), ours.limits), self.context, offer[1], bar_s)
        return self._baseline(name, ours.lengths)

    def least_s(self, name: str, batch: Lengths) -> float:
        """A baseline of the batch that may run takes no less [s]; asked before it plans."""
        offer = self.offer(name)
        keeps = offer[0].baselines.rows[name].keeps if offer else "whole"
        return least_s(None if self.cp > 1 else keeps, batch, self.caps, self.context, orders=self.orders)

    def _rival(self, name: str) -> str:
        """A baseline's name together with that of the plugin that offers it."""
        offer = self.offer(name)
        return f"{offer[0].name}.{name}" if offer else name

    def breaks(self, name: str, plan: StepPlan) -> str:
        """Which setting of its plugin a baseline's plan does not keep; empty where it keeps all."""
        offer = self.offer(name)
        breaks = offer and offer[0].baselines.breaks
        return breaks(plan, offer[1]) if offer and breaks else ""

    @property
    def caps(self) -> Limits:
        """The host's limits under the caps of all enabled plugins: what the recipe promises of every plan that runs."""
        return reduce(lambda limits, link: link[1].capped(limits), self.links, self.limits)

    def under_caps(self, plan: StepPlan) -> StepPlan:
        """The plan, checked under the caps of the recipe, whatever its planner allowed itself. Raises PlanError."""
        groups = groups_of(plan.lengths, self.groups, self.links)
        plan = plan.revised(limits=plan.limits.held_to(self.caps), groups=groups)
        return check(merged(in_rounds(plan)).rounded().with_largest_first())

    def rule(self, name: str, batch: Lengths, tenants: Lengths | None = None) -> StepPlan:
        """The plan of a baseline that may run. Raises EvenloadError."""
        plan = self._checked_baseline(name, batch)
        if broken := self.breaks(name, plan):
            raise EvenloadError(f"the plan '{name}' does not keep the settings of the recipe", broken, "see the recipe")
        return self.with_tenants(self.under_caps(plan), tenants)

    def offer(self, name: str) -> tuple[StepPlugin | LayerPlugin, PluginConfig] | None:
        """The first enabled plugin that offers a baseline; None for the stock plan. Raises EvenloadError."""
        if ALIASES.get(name, name) == STOCK:
            return None
        if name not in self.baseline_names:
            raise EvenloadError("there is no such baseline", repr(name), nearest(name, (STOCK, *self.baseline_names)))
        links: tuple[tuple[StepPlugin | LayerPlugin, PluginConfig], ...] = (*self.links, *self.of_layers)
        return next(link for link in links if name in link[0].baselines.rows)

    @property
    def cp(self) -> int:
        return self.context.layout.cp

    @property
    def largest_slice(self) -> int:
        """Tokens of a sequence that the caps of all plugins allow in a micro-batch, on all ranks that may share it."""
        caps = [getattr(config, "max_tokens", None) for _, config in self.links]
        sharers = self.limits.num_ranks if self.shares else self.cp
        return sharers * min((cap for cap in caps if cap is not None), default=UNCAPPED)

    @property
    def needs_loads(self) -> bool:
        """Whether plans depend on the loads of experts in earlier steps."""
        return not self._idle_in_layers and any(
            plugin.needs_loads(config, self.instead if self.instead in plugin.baselines.rows else "")
            for plugin, config in self.of_layers
            if plugin.needs_loads
        )

    def with_loads(self, loads: Loads) -> PlanChain:
        """The chain of a run whose experts had these loads."""
        experts = self.context.experts
        assert experts is not None
        return replace(self, context=replace(self.context, experts=experts._replace(loads=loads)))

    def baselines_for(self, batch: Lengths, purpose: Literal["shown", "tried"]) -> tuple[str, ...]:
        """The baselines that are planned for a batch of this size; those of layers, whose loads lengths do not tell,
        are not among them."""
        size = len(batch) * self.limits.num_ranks
        rows: dict[str, Baseline] = {}
        for plugin, _ in self.links:
            rows = {**plugin.baselines.rows, **rows}
        padded = self.caps.padded
        names = [name for name in self.baseline_names if name in rows or self.offer(name) is None]
        if purpose == "tried":
            names = [name for name in names if name not in rows or rows[name].padded == padded]
        largest = {name: sizes for name, row in rows.items() if (sizes := row.sizes)}
        return tuple(n for n in names if n not in largest or size <= getattr(largest[n], purpose))

    @property
    def baseline_names(self) -> tuple[str, ...]:
        """All baselines, the stock plan first."""
        links = (*self.links, *self.of_layers)
        return tuple(dict.fromkeys(["padded", *(name for plugin, _ in links for name in plugin.baselines.rows)]))


def signed(name: str, incoming: StepPlan, plan: StepPlan) -> StepPlan:
    """A plan that names the plugin that has changed the incoming one, where its planner has not."""
    if plan.made_by != incoming.made_by or (plan.micro_batches, plan.order) == (incoming.micro_batches, incoming.order):
        return plan
    return plan.revised(made_by=f"{plan.made_by}, {name}" if plan.made_by else name)
