"""The registry of plugins. Every verb has its inverse; a clash shows both sides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
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

    def unshared(self) -> PluginConfig:
        """Settings where no ranks share a sequence."""
        return self

    def in_rows(self, count: int = 1) -> PluginConfig | None:
        """Settings where a model keeps apart only what stands in rows of its own, ``count`` of which are a sequence of
        the plan; None: nothing is planned then."""
        return None

    def capped(self, limits: Limits) -> Limits:
        """The limits with the caps of this section, none raised: they hold for what every plugin plans."""
        return limits

    def idle(self) -> str:
        """What a run warns of where the section asks for something and ``enabled`` is false; empty: nothing."""
        return ""


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


Planner = Callable[[StepPlan, PlanningContext, Any], StepPlan]
"""``plan(plan, context, config)``: a lawful plan made of another one; a pure function."""

Decision = Literal["places", "orders", "shares", "groups"]
"""What plans of a plugin say beyond what came in.

places      micro-batches of the bare sequences; other planners of steps rearrange those of a lawful plan
orders      in which order each stage runs, so a host that is not ours must let go of its own schedule
shares      on how many ranks a sequence runs, so a recipe sets no ``parallel.cp`` with it
groups      sequences of a group stay together, and ranks get equal counts of them, where the limits ask for it
"""


@dataclass(frozen=True)
class Baseline:
    """Someone else's answer to the question of a plugin, for comparison."""

    plan: Planner
    """Some are `Prunable`."""
    keeps: Keeps | None = None
    """Known before it plans: one that could not win is not planned."""
    sizes: Sizes | None = None
    """It takes much longer than the plugin, and is planned up to this size; None: for any batch."""
    padded: bool = False
    """Made for padded rows (`Limits.padded`): tried there alone, and there no other one is."""


@dataclass(frozen=True)
class Baselines:
    """Other people's answers to the question of a plugin."""

    rows: Mapping[str, Baseline] = field(default_factory=dict)
    simpler: str = ""
    """The one that takes over when the plugin fails or is late; empty: the identity."""
    quick: tuple[str, ...] = ()
    """Those that plan in a small part of the plugin's time, from better to safer: what runs where that is not there in
    time."""
    breaks: Callable[[StepPlan, Any], str] | None = None
    """``breaks(plan, config)`` says which setting of the section a plan of theirs does not keep; empty: it keeps all.
    One that breaks some is shown for comparison and never runs instead of the plugin's own."""


@dataclass(frozen=True)
class Shown:
    """What tables and the end of a run say of a plugin."""

    does: str = ""
    """What it does in a training loop, in a few words; empty: the table does not say."""
    to_whole: str = ""
    """The same where samples stay whole; empty: nothing."""
    by: tuple[str, ...] = ()
    """Branches and signs (`core.plan.branches`) of which a step has one where the plugin did something in it; empty:
    nothing is said of that."""


@dataclass(frozen=True)
class Needs:
    """What settings of a plugin ask of the host that runs its plans."""

    host: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings that only evenload's own training loop can honour, each with the values that ask nothing of it."""
    order: tuple[str, ...] = ()
    """Those of ``host`` that any host honours which runs slices in the order of a plan."""
    replays: Mapping[str, Any] = field(default_factory=dict)
    """Settings for which a host runs forwards again, each with the value that asks for no such pass."""
    branches: Callable[[Any, PlanningContext], Mapping[str, Any]] = lambda config, context: {}
    """``branches(config, context)``: each branch of the runtime (`core.plan.branches`) that the settings open, with
    settings under the same caps by which a plan most likely takes it."""


@dataclass(frozen=True)
class Estimates:
    """What is known of a planner of steps before it plans."""

    floor_s: Callable[[npt.NDArray[np.int64], Limits, PlanningContext, Any], float] | None = None
    """``floor_s(lengths, limits, context, config)``: no plan that it makes of sequences [K] has run its last pass
    before [s], gradient sum left out; None: it has no better bound than `core.balance.step_bound`."""
    work_s: Callable[[int, int, int], float] | None = None
    """``work_s(sequences, ranks, stages)``: about how long ``plan`` takes [s], counted and not measured, so that ranks
    agree on it; None: no time."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What all plugins say of themselves. Each answers one question by pure functions, at one of four places:

    `StepPlugin`        which slices run where and when, one step ahead and in the background
    `LayerPlugin`       what is known only inside the step, from counts that every rank has there
    `DataPlugin`        what is drawn, before there is a plan
    `SlicePlugin`       the order of the slices inside the micro-batches of a plan that is complete
    """

    name: str
    summary: str
    papers: tuple[str, ...]
    stage: int
    """Plugins of one place run in ascending ``stage``."""
    config: type[PluginConfig]
    clashes: tuple[str, ...] = ()
    """Names of plugins that cannot be enabled together with this one."""
    shown: Shown = Shown()
    needs: Needs = Needs()
    baselines: Baselines = Baselines()
    decides: frozenset[Decision] = frozenset()

    @property
    def origin(self) -> str:
        """The module that offers it."""
        return str(getattr(self, "plan", self.config).__module__)


@dataclass(frozen=True, kw_only=True)
class StepPlugin(Plugin):
    """A planner of steps: maps a plan to a lawful plan. A disabled one is the identity."""

    plan: Planner
    tries: Callable[[Layout], Mapping[str, tuple[Any, ...]]] | None = None
    """``tries(layout)``: keys of the section, each with the values that a search compares on such a layout. None: it
    leaves the section as the recipe has it."""
    estimates: Estimates = Estimates()
    hold_back: Callable[[Any], HoldBack | None] | None = None
    """``hold_back(config)`` gives the rule by which sequences wait for a later step; None: all run when drawn."""


@dataclass(frozen=True, kw_only=True)
class LayerPlugin(Plugin):
    """A planner of layers: what of it is slow is data in the plan, which ``plan`` writes into one that is complete but
    for it. Its baselines do the same."""

    plan: Planner
    layers: Mapping[str, LayerPlanner] = field(default_factory=dict)
    """By the name that a plan's `ExpertPolicy` gives, the function that the ranks of a group ask in every layer."""
    needs_loads: Callable[[Any, str], bool] | None = None
    """``needs_loads(config, baseline)``: whether what it, or its baseline of that name, writes into a plan depends on
    the loads of earlier steps (`ExpertContext.loads`); a run then keeps them. ``baseline``: empty for the planner
    itself. None: neither does."""
    shards_experts: Callable[[Any], bool] | None = None
    """``shards_experts(config)``: whether the settings want experts cut over their group, a piece of each on every
    rank. None: none do."""


@dataclass(frozen=True, kw_only=True)
class DataPlugin(Plugin):
    """A chooser of data: policies by which what is drawn, or what it counts, follows what training shows."""

    policies: Mapping[Kind, Mapping[str, DataPolicy]] = field(default_factory=dict)
    """By kind and by the names that a recipe gives."""
    chooses: Callable[[Any, Kind], ChosenPolicy | None] | None = None
    """``chooses(config, kind)``: the policy of a kind that the settings ask for; None: none."""
    first_shares: Callable[[Any, Sequence[str], Sequence[int]], Mapping[str, Any]] | None = None
    """``first_shares(recipe, names, samples)``: by what domains of ascending names, of so many samples each, are drawn
    before the first step, where a run moves their shares (`training.drawing.Drawing.use`): ``shares`` [K], and
    ``objective`` [K] if their mean losses are added up by one; empty: nothing moves them. None: nothing ever does."""


@dataclass(frozen=True, kw_only=True)
class SlicePlugin(Plugin):
    """A planner of slices, asked where sequences have tenants: of any plan, baselines and the trainer's own too."""

    plan: Planner
    adapts: Callable[[], Any] | None = None
    """The model is frozen, and adapters of tenants are trained on it, by the functions of the module that this imports
    (`training.adapting.AdapterTraining`). None: the model itself is trained."""


_plugins: dict[str, Plugin] = {}


def register(plugin: Plugin) -> Plugin:
    """Add a plugin under its name. Raises EvenloadError if another one has it, or if it says nothing that is asked."""
    if not isinstance(plugin, StepPlugin | LayerPlugin | DataPlugin | SlicePlugin):
        kinds = "StepPlugin, LayerPlugin, DataPlugin or SlicePlugin"
        raise EvenloadError(f"the plugin '{plugin.name}' is of no kind", type(plugin).__name__, f"make it a {kinds}")
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
    of_plugins = (plugin.layers for plugin in registered() if isinstance(plugin, LayerPlugin))
    known = {AT_HOME: at_home, **{key: one for layers in of_plugins for key, one in layers.items()}}
    if name not in known:
        raise EvenloadError("there is no such planner of layers", repr(name), nearest(name, known))
    return known[name]


def data_policies(kind: Kind) -> dict[str, DataPolicy]:
    """The policies of a kind that all plugins offer, by name. Raises EvenloadError where two offer one of a name."""
    known: dict[str, DataPolicy] = {}
    origins: dict[str, str] = {}
    for plugin in registered():
        for name, policy in plugin.policies.get(kind, {}).items() if isinstance(plugin, DataPlugin) else ():
            if name in known:
                detail = f"{origins[name]} offers one, and {plugin.name} another"
                raise EvenloadError(f"two {kind} policies are called '{name}'", detail, "rename one of them")
            known[name], origins[name] = policy, plugin.name
    return known


@cache
def load_plugins() -> None:
    """Register evenload's own plugins, a folder of ``plugins/`` each, and those of other packages."""
    import_module("..plugins", __package__)
    load_entry_points()


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
            text = "the plugin package of '%s' cannot be imported (%s: %s: %s); repair or uninstall it"
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
