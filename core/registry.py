"""The registry of plugins. Every verb has its inverse; a clash shows both sides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .costs.context import PlanningContext as PlanningContext
from .errors import EvenloadError, nearest
from .experts.quotas import LayerPlanner, at_home
from .input.validation import Frozen
from .machine.layout import Layout
from .plan.expert_policy import AT_HOME
from .plan.limits import Limits
from .plan.step_plan import StepPlan
from .policies import ChosenPolicy, DataPolicy, Kind

log = logging.getLogger("evenload")

ENTRY_POINT_GROUP = "evenload.plugins"


class PluginConfig(Frozen):
    """Base of every plugin's section in a recipe."""

    enabled: bool = False
    """Run this plugin; a disabled plugin is the identity."""

    def folded(self, num_ranks: int) -> PluginConfig:
        """Settings where ``num_ranks`` ranks act as one: what is counted a rank is so many times as much."""
        return self

    def uncut(self) -> PluginConfig:
        """Settings where no sequence may be cut."""
        return self

    def in_rows(self, count: int = 1) -> PluginConfig | None:
        """Settings where a model keeps apart only what stands in rows of its own, ``count`` of which are a sequence of
        the plan; None: nothing is planned then."""
        return None

    def capped(self, limits: Limits) -> Limits:
        """The limits with the caps of this section, none raised: they hold for what every plugin plans."""
        return limits


Situation = PlanningContext
"""The name by which plugins that were written earlier know a planning context."""


HoldBack = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64], int, PlanningContext], npt.NDArray[np.bool_]]
"""Which sequences wait for a later step: lengths [K] in tokens, steps waited so far [K] (0: drawn now), number of ranks
and context -> mask [K].

A pure function: every rank asks it. It must let something run, and what it holds back once it must let run later."""


@runtime_checkable
class Prunable(Protocol):
    """A baseline that plans several ways, and can leave out early what is too slow to run."""

    def below(self, stock: StepPlan, context: PlanningContext, config: Any, bar_s: float, /) -> StepPlan | None:
        """Its best plan under the limits of ``stock``, if that takes less than ``bar_s``; else perhaps None."""
        ...


Keeps = Literal["on one rank", "whole"]
"""What a baseline does with every sequence: its slices all run on one rank, or it is one slice."""


class Sizes(NamedTuple):
    """The most sequences x ranks of a batch for which a baseline is planned."""

    shown: int
    """To be compared with in tables."""
    tried: int
    """To run where it is faster than what the plugins planned."""


@dataclass(frozen=True)
class Plugin:
    """One plugin: its schema and its planner. It answers one question as a pure function, at one of four places:

    steps      ``plan(plan, context, config)`` maps a plan to a lawful plan, one step ahead and in the background.
               Plugins run in ascending ``stage``; a disabled one is the identity
    layers     what is known only inside the step, from counts that every rank has there. What of it is slow is data in
               the plan
    batches    what is drawn, before there is a plan
    slices     ``plan(plan, context, config)`` orders the slices inside the micro-batches of a plan that is complete,
               of baselines and the trainer's own too; it is asked where sequences have tenants

    ``plan`` of a planner of layers writes that data into a plan that is complete but for it. Its baselines do the same.
    """

    name: str
    summary: str
    papers: tuple[str, ...]
    stage: int
    config: type[PluginConfig]
    plan: Callable[[StepPlan, PlanningContext, Any], StepPlan]
    does: str = ""
    """What it does in a training loop, in a few words of a table; empty: the table does not say."""
    does_to_whole: str = ""
    """The same where samples stay whole; empty: nothing."""
    places: bool = False
    """``plan`` makes micro-batches from the bare sequences; other plugins rearrange those of a lawful plan."""
    baselines: Mapping[str, Callable[[StepPlan, PlanningContext, Any], StepPlan]] = field(default_factory=dict)
    """Other people's answers to the same question, for comparison; some are `Prunable`."""
    keeps: Mapping[str, Keeps] = field(default_factory=dict)
    """Baselines of which that is known before they plan: one that could not win is not planned."""
    costly: Mapping[str, Sizes] = field(default_factory=dict)
    """Baselines that take much longer to plan than ``plan`` itself, and up to which size they are planned."""
    row_baselines: frozenset[str] = frozenset()
    """Baselines that are made for padded rows (`Limits.padded`): tried there alone, and there no other one is."""
    tries: Callable[[Layout], Mapping[str, tuple[Any, ...]]] | None = None
    """``tries(layout)``: keys of the section, each with the values that a search compares on such a layout. None: it
    leaves the section as the recipe has it."""
    floor_s: Callable[[npt.NDArray[np.int64], Limits, PlanningContext, Any], float] | None = None
    """``floor_s(lengths, limits, context, config)``: no plan that it makes of sequences [K] has run its last pass
    before [s], gradient sum left out; None: it has no better bound than `core.balance.step_bound`."""
    breaks: Callable[[StepPlan, Any], str] | None = None
    """``breaks(plan, config)`` says which setting of the section a baseline's plan does not keep; empty: it keeps all.

    Such a plan is shown for comparison and never runs instead of the plugin's own.
    """
    work_s: Callable[[int, int, int], float] | None = None
    """``work_s(sequences, ranks, stages)``: about how long ``plan`` takes [s], counted and not measured, so that ranks
    agree on it; None: no time."""
    quick: tuple[str, ...] = ()
    """Baselines that plan in a small part of the time of ``plan``: what runs where that is not there in time."""
    simpler: str = ""
    """The baseline that takes over when ``plan`` fails or is late; empty means the identity."""
    hold_back: Callable[[Any], HoldBack | None] | None = None
    """``hold_back(config)`` gives the rule by which sequences wait for a later step; None: all run when drawn."""
    needs_host: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings that only evenload's own training loop can honour, each with the values that ask nothing of it."""
    needs_order: tuple[str, ...] = ()
    """Those of ``needs_host`` that any host honours which runs slices in the order of a plan."""
    needs_replays: Mapping[str, Any] = field(default_factory=dict)
    """Settings for which a host runs forwards again, each with the value that asks for no such pass."""
    orders: bool = False
    """``plan`` says in which order each stage runs, so a host that is not ours must let go of its own schedule."""
    shares: bool = False
    """``plan`` chooses on how many ranks a sequence runs, so that there is no ``parallel.cp`` beside it."""
    branches: Callable[[Any, PlanningContext], Mapping[str, Any]] | None = None
    """``branches(config, context)``: each branch of the runtime (`core.plan.branches`) that the settings open, with
    settings under the same caps by which a plan most likely takes it."""
    keeps_groups: bool = False
    """Its plans keep sequences of a group together, and ranks at equal counts of them, where the limits ask for it."""
    clashes: tuple[str, ...] = ()
    """Names of plugins that cannot be enabled beside this one."""
    place: Literal["steps", "layers", "batches", "slices"] = "steps"
    """Where it plans."""
    layers: Mapping[str, LayerPlanner] = field(default_factory=dict)
    """What a planner of layers offers: by the name that a plan's `ExpertPolicy` gives, the function that the ranks of a
    group ask in every layer."""
    needs_loads: Callable[[Any, str], bool] | None = None
    """``needs_loads(config, baseline)``: whether what a planner of layers, or its baseline of that name, writes into a
    plan depends on the loads of earlier steps (`ExpertContext.loads`); a run then keeps them. ``baseline``: empty for
    the planner itself. None: neither does."""

    policies: Mapping[Kind, Mapping[str, DataPolicy]] = field(default_factory=dict)
    """What a plugin of batches offers, by kind and by the names that a recipe gives."""
    chooses: Callable[[Any, Kind], ChosenPolicy | None] | None = None
    """``chooses(config, kind)``: the policy of a kind that the settings of a plugin of batches ask for; None: none."""

    shown_by: tuple[str, ...] = ()
    """Branches and signs (`core.plan.branches`) of which a step has one where the plugin did something in it; empty:
    nothing is said of that."""
    adapts: bool = False
    """The model stays as it is, and adapters of tenants are trained beside it."""
    shards_experts: Callable[[Any], bool] | None = None
    """``shards_experts(config)``: whether the settings want experts cut over their group, a piece of each on every
    rank. None: none do."""

    @property
    def origin(self) -> str:
        return self.plan.__module__


_plugins: dict[str, Plugin] = {}


def register(plugin: Plugin) -> Plugin:
    """Add a plugin under its name. Raises EvenloadError if another one has it."""
    known = _plugins.get(plugin.name)
    if known is not None and known is not plugin:
        raise EvenloadError(
            f"two plugins are called '{plugin.name}'",
            f"{known.origin} is registered, {plugin.origin} wants the name",
            "rename one, or unregister the first",
        )
    _plugins[plugin.name] = plugin
    return plugin


def unregister(name: str) -> Plugin:
    """Take a plugin out again. Raises EvenloadError if there is none of that name."""
    get(name)
    return _plugins.pop(name)


def get(name: str) -> Plugin:
    if name not in _plugins:
        raise EvenloadError("there is no such plugin", repr(name), nearest(name, _plugins))
    return _plugins[name]


def registered() -> tuple[Plugin, ...]:
    """All plugins in the order in which they plan."""
    return tuple(sorted(_plugins.values(), key=lambda plugin: (plugin.stage, plugin.name)))


def layer_planner(name: str) -> LayerPlanner:
    """The planner of layers that a plan names. Raises EvenloadError if no plugin offers it."""
    known = {AT_HOME: at_home, **{key: one for plugin in registered() for key, one in plugin.layers.items()}}
    if name not in known:
        raise EvenloadError("there is no such planner of layers", repr(name), nearest(name, known))
    return known[name]


def data_policies(kind: Kind) -> dict[str, DataPolicy]:
    """The policies of a kind that all plugins offer, by name. Raises EvenloadError where two offer one of a name."""
    known: dict[str, DataPolicy] = {}
    origins: dict[str, str] = {}
    for plugin in registered():
        for name, policy in plugin.policies.get(kind, {}).items():
            if name in known:
                detail = f"{origins[name]} offers one, and {plugin.name} another"
                raise EvenloadError(f"two {kind} policies are called '{name}'", detail, "rename one of them")
            known[name], origins[name] = policy, plugin.name
    return known


def load_entry_points() -> None:
    """Import what other packages offer under the entry-point group ``evenload.plugins``; each registers itself.

    One that cannot be imported is warned of: only a recipe that names its plugin is refused then. Raises EvenloadError
    where one registers a name that is taken.
    """
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()
        except EvenloadError:
            raise
        except Exception as error:
            text = "the plugin package behind '%s' cannot be imported (%s: %s: %s); repair or uninstall it"
            log.warning(text, entry.name, entry.value, type(error).__name__, error)


def refuse_clashes(enabled: Iterable[str]) -> None:
    """Raise EvenloadError if two enabled plugins exclude each other."""
    names = set(enabled)
    for name in sorted(names):
        clash = sorted(names & set(get(name).clashes))
        if clash:
            raise EvenloadError(
                f"the plugins '{name}' and '{clash[0]}' cannot be enabled together",
                f"plugins.{name}.enabled=true and plugins.{clash[0]}.enabled=true",
                "disable one of them",
            )
