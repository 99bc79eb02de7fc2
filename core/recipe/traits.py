"""What a planner must know of a trainer: one row of data for each, handed in by the trainer's integration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..costs.context import Sharding
from ..errors import EvenloadError, Rule


class States(NamedTuple):
    """Bytes of one weight, on one rank that shares it with nobody."""

    fixed: int
    """Between steps."""
    sharded: int
    """The part of ``fixed`` that data-parallel ranks divide between them."""
    late: int = 0
    """Of the gradient, where it is made in a step's first backward."""
    gathered: int = 0
    """Of the whole weight beside the rank's part of it, where weights are divided and gathered for the passes."""
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


def frozen(traits: TrainerTraits) -> TrainerTraits:
    """The trainer where the model stays as it is: it keeps weights alone, and sums no gradients of them."""
    divided, value_bytes = traits.sharding == "parameters", traits.value_bytes
    states = traits.states._replace(fixed=value_bytes, sharded=value_bytes if divided else 0, late=0)
    sharding: Sharding = "parameters" if divided else "none"
    return replace(traits, states=states, sharding=sharding, summed_bytes=0, overlaps_gradients=False)


@dataclass(frozen=True)
class Trainer:
    """What an integration hands in of its trainer; both are asked with a recipe."""

    traits: Callable[[Any], TrainerTraits]
    rules: Callable[[Any], list[Rule]] = lambda _: []
    """What the trainer cannot run, beyond what none can."""
    run_rules: Callable[[Any], list[Rule]] = lambda _: []
    """What can be planned for the trainer, and not run by this integration."""
    runs_any_model: bool = False
    """It builds Transformers' own causal models from their config, whatever that says."""


_trainers: dict[str, Trainer] = {}


def register_trainer(name: str, trainer: Trainer) -> None:
    """Let recipes ask for a trainer. One that is registered again is replaced."""
    _trainers[name] = trainer


def trainer_called(name: str) -> Trainer:
    """The trainer of that name. Raises EvenloadError for one whose integration was not imported."""
    if name not in _trainers:
        known = ", ".join(_trainers) or "no trainer"
        raise EvenloadError(
            f"nobody says what trainer '{name}' is like", f"known: {known}", "import evenload.api first"
        )
    return _trainers[name]


def trainers_of_any_model() -> list[str]:
    """Names of the trainers that run any causal model of Transformers."""
    return [name for name, trainer in _trainers.items() if trainer.runs_any_model]
