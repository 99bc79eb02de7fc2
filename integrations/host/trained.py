"""What a host trains: the weights of its model (`Weights`), or adapters on a frozen one (`tenants.Tenants`).

Weights may be frozen (`freeze`): they have no gradient and no state of the optimizer, and count in no norm. They stand
in the model and in checkpoints as usual.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...core.errors import EvenloadError, nearest
from ...core.plan.step_plan import Slice, StepPlan
from ...core.simulate.step import Span
from ...runtime.experts.gate import Load
from ...runtime.world.agreement import Group
from ...runtime.world.replicas import JobGroup
from ..reference.textbook import AdamState
from .scoring import Scores
from .step import Step


class TenantResult(NamedTuple):
    """What a step did for one tenant."""

    loss: float
    """Sum of its token losses / its target tokens, or by their weights; the same number on every rank."""
    num_targets: int
    grad_norm: float
    """Of its adapter's gradient, before clipping."""
    scores: Scores
    """The losses of its own sequences, in the order of its draw."""
    failed: str = ""
    """Why its adapter was not updated; empty: it was."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    """Sum of token losses / target tokens of the global batch, or by their weights; the same number on every rank."""
    num_targets: int
    """Target tokens of the global batch."""
    busy_s: float
    """Seconds this rank spent in forward and backward of its micro-batches, gradient reduction left out; which seconds
    these are on which device is said in `runtime.measure.busy`."""
    forward_s: float
    """The forward part of ``busy_s``."""
    executed: tuple[Slice, ...]
    """Slices this rank ran, for the count of tokens missing or repeated."""
    branches: tuple[str, ...]
    """What the host decided beyond the plan, in the words of `core.plan.branches`."""
    expert_loads: tuple[Load, ...] = ()
    """What the routers of this rank's layers did, by layer and pass; empty for a dense model."""
    stretches_s: tuple[float, ...] = ()
    """Seconds of compute of this rank between the exchanges of tokens with experts, in the order in which all ranks of
    its group run them; empty on CUDA, and without experts."""
    grad_norm: float = 0.0
    """Norm of the global gradient before clipping; filled in last."""
    tenants: Mapping[int, TenantResult] = field(default_factory=dict)
    """By tenant, where adapters are trained (`integrations.host.tenants`)."""
    scores: Scores | None = None
    """The losses of the sequences of the step, where they were asked for, the same on every rank."""
    spans: tuple[Span, ...] = ()
    """What this rank did when, on the wall clock, in seconds since it entered the step; empty unless recorded.

    F, R and B carry the numbers that passes have in the plan (-1: a dummy of the trainer's own, which the plan lacks),
    G holds the waiting for slower ranks, and what lies between spans is waiting or the trainer's own work. A layer that
    is recomputed inside a backward (``train.recompute``) is part of B. Ranks share one origin as well as they have
    entered together: on one machine they share the clock, between machines it is as good as the barrier before."""


class PassResult(NamedTuple):
    """What the passes of a rank came to."""

    executed: tuple[Slice, ...]
    branches: tuple[str, ...] = ()
    """Those that the plan does not show, in the words of `core.plan.branches`."""


class Trainable(ABC):
    """What the steps of a host move. All methods but `describe` are collective."""

    frozen: frozenset[str] = frozenset()
    """Global names of the parameters that keep their values, of the whole model."""

    def begin(self, plan: StepPlan) -> None:
        """Before the passes of a plan, scores too."""
        return

    @abstractmethod
    def run(self, step: Step) -> StepResult:
        """All forwards and backwards of this rank and the gradient sum; norm and spans are left out."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """The summed gradients of this rank's part of the model by global name, on the CPU."""

    @abstractmethod
    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The norm of the whole model's gradient, from what `gradients` gave on each rank."""

    @abstractmethod
    def update(self, lr: Any) -> float:
        """Clip and apply the gradients; their norm before clipping."""

    def digest(self) -> int:
        """A number of the bits of what is trained, the same on all replicas of a job that hold the same."""
        return 0

    def discard(self) -> None:
        """Forget the gradients of a step that is not taken."""
        return

    @abstractmethod
    def optimizer_states(self) -> Mapping[str, AdamState]:
        """What the optimizer holds, after a step, of every parameter that `gradients` names, whole, on the CPU."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What it adds to the host's log line."""

    def close(self) -> None:
        """Release what was added to the model."""
        return


class Weights(Trainable):
    """The weights of a host's model."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write model and optimizer into an existing empty directory."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Read what `save` wrote, on any layout the trainer can reshard to."""


class Snapshots(Weights):
    """Weights whose checkpoints can be written while training goes on (``checkpoint.background``), and that replicas
    which come later can have; the traits of other trainers refuse both."""

    @abstractmethod
    def snapshot(self, directory: Path, group: Group) -> Callable[[], None]:
        """Copy what `save` would write; the call that writes it, from any thread. Collective, and that call is so over
        ``group``."""

    @abstractmethod
    def receive(self, across: JobGroup, source: int) -> None:
        """Have what the replica of one rank of the job has after its last step. Collective over the job."""


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter of a model wants a gradient; then those again that did."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def freeze(patterns: Sequence[str], own: Mapping[str, nn.Parameter], stages: Sequence[Sequence[str]]) -> frozenset[str]:
    """Freeze what the patterns (``train.freeze``) name; the names of all parameters that are frozen anywhere.

    Args:
        patterns: as a shell has them; upper and lower case differ.
        own: this rank's parameters by global name, before an engine or an optimizer is made for them.
        stages: the global names of the parameters of each part of the model, those of other ranks too.

    Raises:
        EvenloadError: a pattern matches no name, or nothing is left to train, of the model or of one of its parts.
    """
    names = sorted({name for part in stages for name in part})
    frozen: set[str] = set()
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            kinds = {re.sub(r"\.\d+(?=\.)", ".*", name) for name in names}
            raise EvenloadError("train.freeze matches no parameter of this model", pattern, nearest(pattern, kinds))
        frozen.update(matched)
    for number, part in enumerate(stages):
        if frozen.issuperset(part):
            what = "train.freeze leaves nothing to train" + (f" on pipeline stage {number}" if len(stages) > 1 else "")
            raise EvenloadError(what, ", ".join(patterns), "freeze less, or set fewer stages (parallel.pp)")
    for name, parameter in own.items():
        parameter.requires_grad_(name not in frozen)
    return frozenset(frozen)
