"""The chain of planners: every enabled plugin in order, each handing its plan to the next; none enabled is stock.

Every plan that may run keeps the caps and settings of the recipe (`terms`), whoever made it. A baseline takes over
where the chain fails or is late, and where it is faster (`rivals`); then planners of layers add their policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..errors import EvenloadError, of_request
from ..experts.history import Loads
from ..laws import check
from ..machine.layout import Layout
from ..machine.shape import Shape
from ..plan.rounds import in_rounds
from ..plan.step_plan import Lengths, StepPlan, as_lengths
from ..recipe.recipe import Recipe
from ..recipe.rules import refuse_in_loops
from ..recipe.traits import TrainerTraits
from ..registry import LayerPlugin, SlicePlugin, StepPlugin
from ..simulate.v_shape import merged
from .judge import Candidate, beside, judge, outcome_of
from .layer_policies import LayerPolicies
from .notes import LEFT_OUT, unequal_caps, warn_of_idle, warn_of_sparse
from .rivals import STOCK, Rivals
from .setting import Setting, context_of, limits_of, refuse_others, refuse_too_many
from .static_cp import folded, unfold_cp
from .terms import Terms


@dataclass(frozen=True)
class PlanChain(Terms):
    """Everything but the batch. Pure: the same batch gives the same plan on every rank."""

    instead: str = ""
    """A baseline that plans instead of the plugins, for comparison."""

    @classmethod
    def of_recipe(cls, recipe: Recipe, layout: Layout, setting: Setting | None = None) -> PlanChain:
        """The chain a recipe asks for. ``setting``: of a live model, in place of the recipe's. Raises EvenloadError."""
        setting = setting or Setting.of_recipe(recipe)
        context = context_of(setting, layout)
        return cls(
            tuple((one, recipe.config_of(one.name)) for one in recipe.enabled_of(StepPlugin)),
            context,
            limits_of(setting, context),
            recipe.train.micro_batch_size,
            of_layers=tuple((one, recipe.config_of(one.name)) for one in recipe.enabled_of(LayerPlugin)),
            of_slices=tuple((one, recipe.config_of(one.name)) for one in recipe.enabled_of(SlicePlugin)),
            trees=recipe.trees,
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
            setting = Setting.of_recipe(recipe, shape, traits)
        chain = cls.of_recipe(recipe, layout, setting)
        if warn:
            warn_of_idle(chain.links, whole=whole, orders=orders)
            warn_of_sparse(recipe)
        running = ((p, c.model_copy(update=p.needs.replays)) for p, c in chain.links if "orders" not in p.decides)
        links, limits = chain.links if orders else tuple(running), replace(chain.limits, whole_sequences=whole)
        return replace(chain, links=links, limits=limits)

    def of_groups(self, groups: Any) -> PlanChain:
        """This chain for a batch in which samples of one number stay together, integers [S]; None: as settings say."""
        return self if groups is None else replace(self, groups=as_lengths(groups))

    def with_beside(self, seconds: Iterable[tuple[float, float]]) -> PlanChain:
        """This chain for a batch whose sequences take so many seconds besides their tokens (`Costs.beside`)."""
        costs = self.context.costs.model_copy(update={"beside": tuple(seconds)})
        return replace(self, context=replace(self.context, costs=costs))

    def with_loads(self, loads: Loads) -> PlanChain:
        """The chain of a run whose experts had these loads."""
        experts = self.context.experts
        assert experts is not None
        return replace(self, context=replace(self.context, experts=experts._replace(loads=loads)))

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

    @property
    def rivals(self) -> Rivals:
        """The baselines that its plans are compared with."""
        return Rivals(self)

    @property
    def layers(self) -> LayerPolicies:
        """What its plans say of layers."""
        return LayerPolicies(self.of_layers, self.context, self.instead)

    def stock(self, batch: Lengths, tenants: Lengths | None = None) -> StepPlan:
        """What the trainer would do by itself."""
        return self.owned(self.rivals.planned(STOCK, batch), tenants)

    def plan(self, batch: Lengths, tenants: Lengths | None = None) -> StepPlan:
        """The checked plan of a batch. Raises EvenloadError, `PlanError` for a broken law among them.

        ``tenants``: number of each sequence's tenant [S]; None: there are none.
        """
        return self.with_tenants(self._planned(batch), tenants)

    def baseline(self, name: str, batch: Lengths, tenants: Lengths | None = None) -> StepPlan:
        """The plan of a named baseline: ``stock`` (or ``padded``), or one that an enabled plugin offers.

        It is checked under limits of its own, which may exceed the caps of the recipe.
        """
        return self.with_tenants(self._checked_baseline(name, batch), tenants)

    def rule(self, name: str, batch: Lengths, tenants: Lengths | None = None) -> StepPlan:
        """The plan of a baseline that may run. Raises EvenloadError."""
        plan = self._checked_baseline(name, batch)
        if broken := self.rivals.breaks(name, plan):
            raise EvenloadError(f"the plan '{name}' does not keep the settings of the recipe", broken, "see the recipe")
        return self.with_tenants(self.under_caps(plan), tenants)

    def _planned(self, batch: Lengths) -> StepPlan:
        """The checked plan of a batch, whoever's its sequences are."""
        if self.instead:
            return self._checked_baseline(self.instead, batch)
        *_, plan = self.in_turn(batch)
        return self.finished(plan)

    def _checked_baseline(self, name: str, batch: Lengths) -> StepPlan:
        if self.rivals.offer(name) in self.of_layers:
            return self.layers.of_baseline(name, replace(self, instead="")._planned(batch))
        return check(merged(in_rounds(self.rivals.planned(name, batch))))

    @property
    def staged(self) -> bool:
        """Whether there is a plan to be had on the way to that of `plan`."""
        return bool(self.links) and not self.instead

    def in_turn(self, batch: Lengths) -> Iterator[StepPlan]:
        """The plan after each plugin in turn, last that of all; not yet under the caps. Raises EvenloadError."""
        refuse_too_many(batch, self.caps, self.cp)
        return iter([self._of_cp_groups(batch)]) if self.cp > 1 else self._chained(batch)

    def _chained(self, batch: Lengths) -> Iterator[StepPlan]:
        placing = [place for place, (plugin, _) in enumerate(self.links) if "places" in plugin.decides]
        limits = replace(self.limits, max_tokens=self.caps.max_tokens)
        groups = self.groups_in(batch)
        refuse_others(len(groups) > 0 or self.caps.equal_size, self.caps.padded, (*self.links, *self.of_slices))
        plan = StepPlan(batch, (), limits, groups=groups) if 0 in placing else self.rivals.planned(STOCK, batch)
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

    def _of_cp_groups(self, batch: Lengths) -> StepPlan:
        """The plan of the groups of static context parallelism, each as one rank.

        Such plans know compute alone; so one without cuts, whose prefixes travel once, is simulated too. In a CP
        group every slice moves the keys and values of its whole prefix, which compute may not hide.
        """
        groups = folded(self)
        *_, own = groups._chained(batch)
        plans = [self.under_caps(unfold_cp(own, self.limits, self.cp))]
        if plans[0].cut:
            uncut = replace(groups, links=tuple((plugin, config.uncut()) for plugin, config in groups.links))
            with suppress(EvenloadError):  # a sequence that must be cut
                *_, own = uncut._chained(batch)
                plans.append(self.under_caps(unfold_cp(own, self.limits, self.cp)))
        best = min(plans, key=lambda plan: outcome_of(plan, self.context).step_s)
        # All-to-alls, which are in the costs of a group, would be taken for the head's work.
        moves = groups.context.traffic.cp_comm == "all_to_all" or groups.context.layout.ep > 1
        known = groups.links and not (moves and groups.limits.num_stages > 1)
        return best.revised(bound_s=groups.passes_bound_s(batch) if known else 0.0)

    def finished(self, plan: StepPlan, known: Iterable[Candidate] = ()) -> StepPlan:
        """The plan of all plugins under the caps, baselines weighed. Raises PlanError.

        ``known``: baselines of the batch that have been judged.
        """
        notes = unequal_caps(self.links, self.limits)
        plan = self._bounded(self.under_caps(plan.revised(notes=(*plan.notes, *notes)) if notes else plan))
        if slower := [one.baseline for one in known if one.step_s >= outcome_of(plan, self.context).step_s]:
            plan = beside(plan, map(self.rivals.full_name, slower))
        return self.layers.written(self.rivals.fastest(plan) if self.links else plan)

    def _bounded(self, plan: StepPlan) -> StepPlan:
        """With what no plan of these settings ends its passes before. Where it fits, only those that do are meant; a
        planner that lets ranks share sequences has a bound of its own, of the costs as they are."""
        if not self.links or self.cp > 1:
            return plan
        own_s = self.passes_bound_s(plan.lengths, fits=judge(plan, self.context).fits)
        known_s = 0.0 if self.orders and self.context.costs.recompute else plan.bound_s
        return plan.revised(bound_s=max(own_s, known_s))


def signed(name: str, incoming: StepPlan, plan: StepPlan) -> StepPlan:
    """A plan that names the plugin that has changed the incoming one, where its planner has not."""
    if plan.made_by != incoming.made_by or (plan.micro_batches, plan.order) == (incoming.micro_batches, incoming.order):
        return plan
    return plan.revised(made_by=f"{plan.made_by}, {name}" if plan.made_by else name)
