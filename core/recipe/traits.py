"""What is known of a trainer, and of each loop in which it runs plans: rows of data that its integration hands in.

What a plugin does in a loop follows from what both declare: ``refused`` ends a run before its first step; ``parts of
samples`` are slices and shared sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..costs.costs import Sharding
from ..errors import EvenloadError, Rule
from ..registry import DataPlugin, LayerPlugin, Plugin, SlicePlugin

NOTHING, REFUSED = "-", "refused"
OWN, SCRIPTS = "evenload train", "evenload run"
LOCAL, TRANSFORMER_ENGINE = "local spec", "Transformer Engine's spec"
"""Layer specs; the second has kernels of its own, which take whole samples alone."""


class States(NamedTuple):
    """Bytes of one weight, on one rank that shares it with nobody."""

    fixed: int
    """Between steps."""
    sharded: int
    """The part of ``fixed`` that data-parallel ranks divide between them."""
    late: int = 0
    """Of the gradient, where it is made in a step's first backward."""
    gathered: int = 0
    """Of the whole weight next to the rank's part of it, where weights are divided and gathered for the passes."""
    most_gathered: int = 0
    """The trainer lets go of gathered weights only beyond so many."""

    def gathered_bytes(self, weights: float) -> float:
        """Bytes of gathered weights on a rank of so many weights, while passes run."""
        return float(self.gathered * min(weights, self.most_gathered))


@dataclass(frozen=True)
class TrainerTraits:
    """A trainer as a recipe sets it up."""

    states: States
    sharding: Sharding
    value_bytes: int
    """Of a weight in the passes."""
    summed_bytes: int
    """Of the gradient of one weight, in the sum over ranks."""
    all_in_step: bool = False
    """All ranks run every pass together."""
    overlaps_gradients: bool = False
    """The gradient sum runs while the last backward of the step does."""
    waits_for_sends: bool = False
    """A stage of the trainer's own schedule goes on only when its output has arrived."""
    fewest_stages_that_split: int = 1
    """Pipeline stages from which on weight gradients can be passes of their own."""
    dedups_per_node: bool = False
    """Layers with experts can send a token once to each node, and on from there."""
    divides_tokens: bool = False
    """Between their blocks tensor-parallel ranks divide the tokens (sequence parallelism)."""


def frozen(traits: TrainerTraits) -> TrainerTraits:
    """The trainer where the model stays as it is: it keeps weights alone, and sums no gradients of them."""
    divided, value_bytes = traits.sharding == "parameters", traits.value_bytes
    states = traits.states._replace(fixed=value_bytes, sharded=value_bytes if divided else 0, late=0)
    sharding: Sharding = "parameters" if divided else "none"
    return replace(traits, states=states, sharding=sharding, summed_bytes=0, overlaps_gradients=False)


class Loop(NamedTuple):
    """A training loop that runs plans."""

    name: str
    start: str
    """What its user types."""
    cuts: bool = True
    """Parts of samples may run on a rank, where the attention allows it."""
    stages: str | None = None
    """Orders run over pipeline stages, and under what alone; None: there is one stage."""
    copies: bool = True
    """Ranks may share their experts."""
    specs: tuple[str, ...] = ("",)
    """Layer specs of the trainer, each an attention path."""
    trainer: str = ""
    """The name of its row, which `all_loops` fills in."""

    def does(self, plugin: Plugin) -> str:
        """What a plugin does in the loop, in a few words."""
        of_ours = isinstance(plugin, DataPlugin) or (isinstance(plugin, SlicePlugin) and plugin.adapts is not None)
        if (of_ours and self.start != OWN) or (isinstance(plugin, LayerPlugin) and not self.copies):
            return REFUSED
        if "orders" in plugin.decides:
            return NOTHING if self.stages is None else plugin.shown.does + self.stages
        return (plugin.shown.does if self.cuts else plugin.shown.to_whole) or NOTHING


@dataclass(frozen=True)
class Trainer:
    """All that is known of a trainer outside of its integration, which hands it in; functions are asked with a recipe.

    Modules are given by their names: they are imported where they are needed.
    """

    traits: Callable[[Any], TrainerTraits]
    rules: Callable[[Any], list[Rule]] = lambda _: []
    """What the trainer cannot run, beyond what none can."""
    run_rules: Callable[[Any], list[Rule]] = lambda _: []
    """What can be planned for the trainer, and not run by this integration."""
    runs_any_model: bool = False
    """It builds Transformers' own causal models from their config, whatever that says."""
    packages: tuple[str, ...] = ()
    """Distributions that it needs besides torch."""
    beside: tuple[str, ...] = ()
    """What else its extra holds: for folders of weights, and for logs."""
    host: str = ""
    """The package whose ``open_host`` and ``reference`` evenload's own loop asks for; empty: that does not drive it."""
    reshards: bool = False
    """Its checkpoints load on any layout of as many ranks."""
    gradient_errors: Mapping[str, float] = field(default_factory=dict)
    """Largest error of a gradient that counts as rounding, by ``train.dtype``."""
    loops: tuple[Loop, ...] = ()
    first_imports: tuple[str, ...] = ()
    """The packages of which a script imports one before it trains."""
    planned_where: str = ""
    """What a script must do for its steps to be planned."""
    patches: tuple[str, ...] = ()
    """Modules whose ``rows(recipe)`` go on in scripts where a plugin is enabled."""
    patched_always: bool = False
    """They go on without one, too: the script's own config may enable it."""
    mends: tuple[str, ...] = ()
    """Modules of rows that go on in any case."""
    tries: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of a recipe, each with the values that a search compares for the trainer."""
    says: Callable[[Any], tuple[str, ...]] = lambda _: ()
    """Lines that say in the trainer's own words what a recipe does of layout, shards and recomputation."""
    sums_over_replicas: bool = False
    """Whole models of it train on replicas, which sum their gradients before its update."""
    bridges_cpu: bool = False
    """It needs the CPU bridge where there is no CUDA."""


TRAINERS: dict[str, Trainer] = {}
"""By the names that recipes use, in the order of tables; an integration puts its own in."""


def trainer_called(name: str) -> Trainer:
    """The trainer of that name. Raises EvenloadError for one whose integration was not imported."""
    if name not in TRAINERS:
        what, known = f"nothing says what trainer '{name}' is like", ", ".join(TRAINERS) or "no trainer"
        raise EvenloadError(what, f"known: {known}", "import evenload.api first")
    return TRAINERS[name]


def trainers_with(holds: Callable[[Trainer], Any]) -> list[str]:
    """Names of the trainers of which something holds."""
    return [name for name, trainer in TRAINERS.items() if holds(trainer)]


def all_loops() -> list[Loop]:
    """The loops of all trainers, evenload's own first."""
    loops = [loop._replace(trainer=name) for name, trainer in TRAINERS.items() for loop in trainer.loops]
    return sorted(loops, key=lambda loop: loop.start != OWN)
