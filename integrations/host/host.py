"""What evenload asks of a trainer: run one planned step, hand out gradients, save and load.

`integrations.megatron` and `integrations.deepspeed` each implement `Host` on their trainer's own engine; the training
loop, verify and bench know nothing else of them. One Host lives in each process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.machine.layout import Layout
from ...core.plan.in_step import Program
from ...core.plan.step_plan import Slice, StepPlan
from ...core.recipe.recipe import Recipe
from ...core.simulate.step import Span
from ...runtime.attention.labels import Labels
from ...runtime.attention.pack import TokensOf
from ...runtime.experts.gate import Load
from ...runtime.measure.busy import BusyClock
from ...runtime.stage.executor import StageTrainer
from ...runtime.stage.stage_links import StageLinks
from ...runtime.world.agreement import Group, everyone
from ...runtime.world.plane import Plane
from ..reference.textbook import AdamState
from .scoring import Book, LogitBook, LossBook, Scores
from .step import Mark, Position, Step, no_mark, run_program

Inspect = Callable[[Mapping[str, Tensor]], None]
"""Is shown the gradients of a step by parameter name, summed over all ranks and micro-batches, before clipping."""

UPDATE = "update"
"""What every host marks when all passes and the gradient sum have run and the optimizer begins."""

Rates = Mapping[int, float]
"""The learning rate of each tenant, by its number."""


class TenantResult(NamedTuple):
    """What a step did for one tenant."""

    loss: float
    """Sum of its token losses / its target tokens; the same number on every rank."""
    num_targets: int
    grad_norm: float
    """Of its adapter's gradient, before clipping."""
    failed: str = ""
    """Why its adapter was not updated; empty: it was."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    """Sum of token losses / target tokens of the global batch; the same number on every rank."""
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
    spans: tuple[Span, ...] = ()
    """What this rank did when, on the wall clock, in seconds since it entered the step; empty unless recorded.

    F, R and B carry the numbers that passes have in the plan (-1: a dummy of the trainer's own, which the plan lacks),
    G holds the waiting for slower ranks, and what lies between spans is waiting or the trainer's own work. A layer that
    is recomputed inside a backward (``train.recompute``) is part of B. Ranks share one origin as well as they have
    entered together: on one machine they share the clock, between machines it is as good as the barrier before."""


class Snapshots(ABC):
    """What a host is, too, whose checkpoints can be written while training goes on (``checkpoint.background``); the
    traits of other trainers refuse that setting."""

    @abstractmethod
    def snapshot(self, directory: Path, group: Group) -> Callable[[], None]:
        """Copy what `Host.save` would write; the call that writes it, from any thread. Collective, and that call is so
        over ``group``."""


class Host(ABC):
    """A trainer that runs plans. Raises EvenloadError for what it cannot honour, before the first step.

    All methods but `describe` are collective.
    """

    recipe: Recipe
    layout: Layout
    dp_cp_rank: int
    pipeline_stage: int
    device: torch.device
    norm_epsilon: float | None = None
    """What norms add to the variance where the recipe does not say; None: as Transformers has it."""
    busy_waits: bool
    """`StepResult.busy_s` holds more than this rank's compute: ranks exchange tensors inside their passes."""
    frozen: frozenset[str] = frozenset()
    """Global names of the parameters that keep their values (``train.freeze``), of the whole model."""
    records_routes: bool = False
    """Keep in `routes` to which experts tokens go, for a reference that shall send its tokens there, too."""
    routes: Mapping[tuple[int, int], Tensor] = {}
    """Of the last step, by layer and sequence: the experts of each token that ran here [L, K], -1 of other tokens."""
    _stages: Any = None
    """Process group of the pipeline stages, and expert-parallel ranks, that hold the whole model together; only needed
    where there are several."""
    _links: StageLinks | None = None
    """To the neighbouring stages."""
    _plane: Plane | None = None
    """What ranks share micro-batches over; made, by all ranks together, for the first plan that needs it."""

    def train_step(
        self,
        plan: StepPlan,
        tokens_of: TokensOf,
        *,
        lr: float | Rates,
        labels: Labels | None = None,
        mark: Mark = no_mark,
        record: bool = False,
        inspect: Inspect | None = None,
    ) -> StepResult:
        """Forward, backward, reduction, clipping and update of one planned step.

        ``lr``: a number; of adapters one for each tenant of the plan, by its number.
        ``labels`` say which tokens are targets: None, each but the first of a sequence.
        ``record`` fills `StepResult.spans` and changes no number: line the ranks up right before. ``inspect`` is shown
        what `gradients` would return, right before the update; it must not change it, and judges the step itself.

        Raises EvenloadError, before the update, where `labels` and tokens have another number of targets; with
        ``inspect`` it does not.
        """
        clock = BusyClock(self.device, record=record)
        result = self._run(Step(plan, tokens_of, labels, mark, clock))
        if inspect is None:
            _refuse_other_targets(result, labels)
        else:
            inspect(self._gradients())
        mark(UPDATE)
        with clock.noting("U"):
            norm = self._update(lr)
        return replace(result, grad_norm=norm, spans=clock.spans(self.pipeline_stage, self.dp_cp_rank))

    def gradients(
        self, plan: StepPlan, tokens_of: TokensOf, labels: Labels | None = None
    ) -> tuple[StepResult, Mapping[str, Tensor]]:
        """Run the plan without an update; whole-model gradients (of the loss above) by parameter name, on the CPU,
        those of frozen parameters left out.

        Tensor-parallel shards are returned per rank as the host holds them; a pipeline stage returns its own layers
        under their global names. They went through the reduction that `train_step` uses.
        """
        result = self._run(Step(plan, tokens_of, labels, no_mark, BusyClock(self.device)))
        gradients = self._gradients()
        return replace(result, grad_norm=self._norm(gradients)), gradients

    def score(
        self, plan: StepPlan, tokens_of: TokensOf, *, labels: Labels | None = None, mark: Mark = no_mark
    ) -> Scores:
        """Run the plan's forwards alone: the losses of its sequences, the same on every rank.

        Nothing is kept and no state changes: weights, gradients, random states, loads and biases of experts.
        ``labels``: which tokens are targets; None: each but the first of a sequence.
        """
        book = LossBook(len(plan.lengths), self.device)
        self._forwards(Step(plan, tokens_of, labels, mark, BusyClock(self.device)), book)
        return book.scores()

    def logits(self, plan: StepPlan, tokens_of: TokensOf) -> Mapping[int, Tensor]:
        """The logits of every token, by sequence [length, vocabulary], on the CPU of rank 0; empty on other ranks. They
        are held whole there, so it is for a few short sequences."""
        book = LogitBook()
        self._forwards(Step(plan, tokens_of, None, no_mark, BusyClock(self.device)), book)
        return book.logits(plan.lengths)

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The weights of all pipeline stages as the forward uses them, in its precision, by name, on the CPU; shards as
        in `gradients`."""

    def of_all_stages(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of this rank's part of the model, by name, with those of other pipeline stages and of experts on
        other ranks."""
        parts = everyone(tensors, self._stages) if self.layout.pp * self.layout.ep > 1 else [tensors]
        return {name: tensor for part in parts for name, tensor in part.items()}

    @abstractmethod
    def exported(self) -> Iterator[tuple[str, Tensor | None]]:
        """The tensors of a Hugging Face folder of the model, one after the other, by the folder's names: whole and in
        the precision of the forward on rank 0's CPU, None on all others. Collective in every turn."""

    def expert_biases(self) -> Mapping[int, Tensor]:
        """The bias of each expert, by layer of the whole model from 0, on the CPU; empty without such."""
        return {}

    @abstractmethod
    def optimizer_states(self) -> Mapping[str, AdamState]:
        """What the optimizer holds, after a step, of every parameter that `gradients` names, whole, on the CPU."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write model and optimizer into an existing empty directory."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Read what `save` wrote, on any layout the trainer can reshard to."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Versions, attention kernel, parameters: what a log line and a benchmark should carry."""

    def close(self) -> None:
        """Release what the host holds; the process group stays."""
        for groups in (self._links, self._plane):
            if groups is not None:
                groups.close()
        self._links = self._plane = None

    @abstractmethod
    def _run(self, step: Step) -> StepResult:
        """All forwards and backwards of this rank and the gradient sum; norm and spans are left out."""

    @abstractmethod
    def _forwards(self, step: Step, book: Book) -> None:
        """All forwards of this rank, without gradients; the last stage gives ``book`` what it wants."""

    @abstractmethod
    def _gradients(self) -> dict[str, Tensor]:
        """The summed gradients of this rank's part of the model by global name, on the CPU."""

    @abstractmethod
    def _norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The norm of the whole model's gradient, from what `_gradients` gave on each rank."""

    @abstractmethod
    def _update(self, lr: Any) -> float:
        """Clip and apply the gradients; their norm before clipping."""

    @abstractmethod
    def _open_plane(self) -> Plane:
        """The plane of this rank."""

    def _execute(self, step: Step, program: Program, trainer: StageTrainer) -> tuple[Slice, ...]:
        """Carry out what this rank does in a step; the slices that it ran."""
        position = Position(self.pipeline_stage, self.dp_cp_rank, self._links, self._plane_of(step.plan))
        return run_program(step.plan, program, trainer, position, step.clock, step.mark)

    def _plane_of(self, plan: StepPlan) -> Plane | None:
        """What the micro-batches of a plan are shared over; None where it shares none."""
        if not plan.shared:
            return None
        self._plane = self._plane or self._open_plane()
        self._plane.node_ranks = plan.limits.node_ranks
        return self._plane


def _refuse_other_targets(result: StepResult, labels: Labels | None) -> None:
    """Raise EvenloadError, before an update, where other tokens carried loss than its divisor was counted from."""
    if labels is not None and result.num_targets != (counted := int(labels.targets.sum())):
        raise EvenloadError(
            "the labels of the batch have another number of targets than was counted when the data were opened",
            f"{result.num_targets} targets in the labels, {counted} counted",
            "leave the data files alone while they are trained on, and start again",
        )
