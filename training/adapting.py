"""What the host's verbs ask of the plugin that trains adapters of tenants in place of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from ..core import registry
from ..core.aliases import Ints
from ..core.costs.costs import Costs
from ..core.errors import refuse_first
from ..core.machine.shape import Shape
from ..core.plan.step_plan import StepPlan
from ..core.planning.chain import PlanChain
from ..core.planning.planner import Draw
from ..core.recipe.recipe import Recipe
from .progress import Progress

if TYPE_CHECKING:
    from ..data.sources import Source
    from ..integrations.host.host import Host
    from ..integrations.host.trained import StepResult
    from ..integrations.reference.textbook_adapter import Alone
    from ..runtime.attention.pack import TokensOf
    from ..runtime.watchdog.watchdog import Watchdog
    from ..runtime.world.world import World
    from .job import VerbJob


class ProvenTenant(NamedTuple):
    """A tenant whose samples are proven, with plain training of it alone; without a name: the base model."""

    name: str = ""
    number: int | None = None
    source: Source | None = None
    alone: Alone | None = None


class PlannedTenants(Protocol):
    """Tenants as far as `plan` and `search` go. Needs no torch."""

    @property
    def lengths(self) -> Ints:
        """Lengths of all samples of all tenants."""

    def adapted(self, chain: PlanChain) -> PlanChain:
        """The chain, which is that of the base alone, with what the tenants' adapters cost."""

    def draws(self, chain: PlanChain) -> Iterator[Draw]:
        """The batches of all tenants, one global batch a step, as training with the chain of the base draws them."""

    def saving(self, chain: PlanChain, plans: Sequence[StepPlan]) -> dict[str, Any]:
        """What plans of such batches come to, and what they save: the section ``tenants`` of ``plan --json``."""


class ProfiledBase(Protocol):
    """How `profile` measures a frozen base, which runs backward only where an adapter is trained on it."""

    def step(self, host: Host, plan: StepPlan, tokens_of: TokensOf, mark: Callable[[str], None]) -> StepResult:
        """A step of one adapter, of which all sequences of a plan are, at a learning rate of 0."""

    def of_base(self, costs: Costs, shape: Shape) -> Costs:
        """Costs that such steps give as those of the frozen base."""


class AdapterTraining(Protocol):
    """What `SlicePlugin.adapts` gives. A launcher has no torch: only what trains imports it, when it is called."""

    def preflight(self, recipe: Recipe, num_ranks: int | None, against: tuple[str, ...], *, proof: bool) -> int:
        """The ranks of a job that can run, with these baselines; ``proof``: tenants are made up where there are none.
        Raises EvenloadError; starts nothing."""

    def train(self, recipe: Recipe, against: tuple[str, ...], progress: Progress) -> dict[str, Any] | None:
        """What `evenload train` gives, on this rank."""

    def verify(self, recipe: Recipe, steps: int, progress: Progress, *, weights: bool) -> dict[str, Any] | None:
        """What `evenload verify` gives, on this rank."""

    def company(
        self, recipe: Recipe, world: World, watchdog: Watchdog
    ) -> AbstractContextManager[tuple[VerbJob, list[ProvenTenant]]]:
        """The trainer with all tenants of the recipe. Collective."""

    def tenants(self, recipe: Recipe, lengths: Any) -> PlannedTenants:
        """The tenants of a recipe; ``lengths``: files of lengths by tenant, none: their own data. Raises
        EvenloadError."""

    def profiling(self) -> ProfiledBase:
        """How `evenload profile` measures the frozen base."""

    def adapter_of(self, recipe: Recipe, name: str) -> Path:
        """The folder of a tenant's trained adapter. Raises EvenloadError where there is none."""


def adapter_training(recipe: Recipe, asks: str = "the recipe") -> AdapterTraining:
    """Return what the enabled plugin that trains adapters offers; ``asks``: who needs one. Raises EvenloadError."""
    do = "set plugins.lora.enabled=true, or name no tenant"
    refuse_first((not recipe.adapts, "the recipe has no tenants", asks, do))
    plugin = registry.get(recipe.adapting)
    assert isinstance(plugin, registry.SlicePlugin)
    assert plugin.adapts is not None
    return cast(AdapterTraining, plugin.adapts())
