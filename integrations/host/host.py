"""What evenload asks of a trainer: run one planned step, hand out gradients, save and load.

`integrations.megatron` and `integrations.deepspeed` each implement `Host` on their trainer's own engine; the training
loop, verify and bench know nothing else of them. One Host lives in each process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...core.errors import EvenloadError
from ...core.machine.layout import Layout
from ...core.plan.action import Program
from ...core.plan.step_plan import Slice, StepPlan
from ...core.recipe.recipe import Recipe
from ...core.recipe.sizes import shape_of
from ...runtime.adapters.adapters import Adapters
from ...runtime.adapters.company import Company
from ...runtime.attention.labels import Labels
from ...runtime.attention.pack import TokensOf
from ...runtime.attention.sparse import SparsePass
from ...runtime.experts.routing import Routes
from ...runtime.generate.dealing import Dealer
from ...runtime.generate.engine import Decoder
from ...runtime.generate.request import Completion, Generation, Request
from ...runtime.measure.busy import BusyClock
from ...runtime.stage.executor import StageTrainer
from ...runtime.stage.stage_links import StageLinks
from ...runtime.world.agreement import everyone
from ...runtime.world.plane import Plane
from .generating import Counted, Ending, samples_of
from .gradients import FrozenModel, GradientScores, GradientSettings, opened
from .scoring import (
    Collector,
    LogitCollector,
    LossCollector,
    Scores,
    TokenLossCollector,
    VectorCollector,
    scores_of,
)
from .step import Mark, Position, Step, no_mark, run_programs
from .tenants import Tenants
from .trained import StepResult, Trainable, Weights

T = TypeVar("T")

Inspect = Callable[[Mapping[str, Tensor]], None]
"""Is shown the gradients of a step by parameter name, summed over all ranks and micro-batches, before clipping."""

UPDATE = "update"
"""What every host marks when all passes and the gradient sum have run and the optimizer begins."""

Rates = Mapping[int, float]
"""The learning rate of each tenant, by its number."""


class Host(ABC):
    """A trainer that runs plans. Raises EvenloadError for what it cannot honour, before the first step.

    All methods but `describe` are collective.
    """

    recipe: Recipe
    layout: Layout
    dp_cp_rank: int
    pipeline_stage: int
    """Of a rank with one stage that stage; the device of its pipeline."""
    device: torch.device
    norm_epsilon: float | None = None
    """What norms add to the variance where the recipe does not say; None: as Transformers has it."""
    busy_waits: bool
    """`StepResult.busy_s` holds more than this rank's compute: ranks exchange tensors inside their passes."""
    collects: bool = True
    """Whether this rank takes down what the last layer gives: one of those that hold the model together does."""
    trained: Trainable
    scores_steps: bool = False
    """Fill `StepResult.scores`; adapters are trained without."""
    records_routes: bool = False
    """Keep in `routes` to which experts tokens go, for a reference that shall send its tokens there, too."""
    routes: Mapping[tuple[int, int], Tensor] = {}
    """Of the last step, by layer and sequence: the experts of each token that ran here [L, K], -1 of other tokens."""
    _stages: Any = None
    """Process group of the pipeline stages, and expert-parallel ranks, that hold the whole model together; only needed
    where there are several."""
    _links: Sequence[StageLinks] = ()
    """To the neighbouring stages, of each of `stages`; empty where there is one stage in all."""
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
        company: Company | None = None,
    ) -> StepResult:
        """Forward, backward, reduction, clipping and update of one planned step.

        ``lr``: a number; of adapters one for each tenant of the plan, by its number.
        ``labels`` say which tokens are targets, and with what weight: None, each but the first of a sequence, with 1.
        ``record`` fills `StepResult.spans` and changes no number: line the ranks up right before. ``inspect`` is shown
        what `gradients` would return, right before the update; it must not change it, and judges the step itself.
        ``company``: of replicas, what all of them train in the step; None: the plan is all.

        Raises EvenloadError, before the update, where `labels` and tokens have another number of targets; with
        ``inspect`` it does not. Raises it before the passes where the weights of the labels add up to no finite number,
        or to 0 without a divisor that is given.
        """
        clock = BusyClock(self.device, record=record)
        collector = LossCollector(len(plan.lengths), self.device, labels) if self.scores_steps else None
        step = Step(plan, tokens_of, labels, mark, clock, collector, company)
        result = self.trained.run(step)
        summed = collector.summed() if collector else None
        if inspect is None:
            _refuse_other_targets(result, None if company and result.tenants else step.labels_of_all)
        else:
            inspect(self.trained.gradients())
        scores = scores_of(summed, company) if summed and company else None  # what all do before a step is settled
        mark(UPDATE)
        with clock.noting("U"):
            norm = self.trained.update(lr)
        if summed:
            scores = (scores or scores_of(summed))._replace(**_weights_of(step.labels_of_all))
        return replace(result, grad_norm=norm, scores=scores, spans=clock.spans(self.pipeline_stage, self.dp_cp_rank))

    def gradients(
        self, plan: StepPlan, tokens_of: TokensOf, labels: Labels | None = None
    ) -> tuple[StepResult, Mapping[str, Tensor]]:
        """Run the plan without an update; whole-model gradients (of the loss above) by parameter name, on the CPU,
        those of frozen parameters left out.

        Tensor-parallel shards are returned per rank as the host holds them; a pipeline stage returns its own layers
        under their global names. They went through the reduction that `train_step` uses.
        """
        result = self.trained.run(Step(plan, tokens_of, labels, no_mark, BusyClock(self.device)))
        gradients = self.trained.gradients()
        result = replace(result, grad_norm=self.trained.norm(gradients))
        self.trained.discard()
        return result, gradients

    def score(
        self,
        plan: StepPlan,
        tokens_of: TokensOf,
        *,
        labels: Labels | None = None,
        mark: Mark = no_mark,
        vectors: bool = False,
        sparse: SparsePass | None = None,
    ) -> Scores:
        """Run the plan's forwards alone: the losses of its sequences, the same on every rank.

        Nothing is kept and no state changes: weights, gradients, random states, loads and biases of experts.
        ``labels``: which tokens are targets; None: each but the first of a sequence. ``vectors``: of the last hidden
        states, too, whole on each tensor-parallel rank. ``sparse``: what leaves blocks of keys out of attention, and
        then knows which share it kept; None: nothing does.
        """
        self.trained.begin(plan)
        if sparse:
            sparse.begin(plan)
        collector = LossCollector(len(plan.lengths), self.device)
        if vectors:
            collector = VectorCollector(len(plan.lengths), self.device, shape_of(self.recipe.model).hidden_size)
        with collector.watching(self.output_layer):
            self._forwards(Step(plan, tokens_of, labels, mark, BusyClock(self.device), sparse=sparse), collector)
        return collector.scores()._replace(**_weights_of(labels))

    def logits(self, plan: StepPlan, tokens_of: TokensOf) -> Mapping[int, Tensor]:
        """The logits of every token, by sequence [length, vocabulary], on the CPU of rank 0; empty on other ranks. They
        are held whole there, so it is for a few short sequences."""
        self.trained.begin(plan)
        collector = LogitCollector()
        self._forwards(Step(plan, tokens_of, None, no_mark, BusyClock(self.device)), collector)
        return collector.whole(plan.lengths)

    def token_losses(
        self,
        plan: StepPlan,
        tokens_of: TokensOf,
        *,
        labels: Labels | None = None,
        mark: Mark = no_mark,
        sparse: SparsePass | None = None,
    ) -> Mapping[int, Tensor]:
        """The loss of each token as a target, by sequence [length], on the CPU of rank 0, empty on other ranks; 0 where
        a token is none. `score` sums them up."""
        self.trained.begin(plan)
        if sparse:
            sparse.begin(plan)
        collector = TokenLossCollector()
        self._forwards(Step(plan, tokens_of, labels, mark, BusyClock(self.device), sparse=sparse), collector)
        return {number: losses_L.roll(1) for number, losses_L in collector.whole(plan.lengths).items()}

    def generate(
        self,
        requests: Sequence[Request],
        settings: Generation,
        *,
        ended: Ending = lambda _: None,
        counted: Counted = lambda _: None,
        mark: Mark = no_mark,
        dealer: Dealer | None = None,
    ) -> tuple[Completion, ...]:
        """Samples of prompts by the weights as they are, in the order of prompts, the same on every rank; under
        ``settings.collect`` also those that are not kept, as far as they have come.

        No state changes: weights, gradients, random states. ``ended`` is shown each sample that is kept when that is
        known, on one of the ranks that made it, and ``counted`` how many have ended on all ranks. ``dealer``: which
        rank makes which of them; None: in turn. Raises EvenloadError for a model or requests that cannot be generated,
        before the first token.
        """
        return samples_of(self, requests, settings, ended, counted, mark, dealer or Dealer())

    def gradient_scores(self, settings: GradientSettings) -> AbstractContextManager[GradientScores]:
        """Inside, gradients of samples by low-rank matrices on the model as it is, projected or along a direction.

        No state changes: weights, gradients, optimizer, random states. Nothing else may run on the host meanwhile but
        `score`. Raises EvenloadError for a model or settings that cannot be.
        """
        return opened(self, settings)

    @abstractmethod
    def frozen_model(self) -> AbstractContextManager[FrozenModel]:
        """Inside, no weight of the model gets a gradient, and its linear layers can be adapted."""

    @abstractmethod
    def decoding(self) -> AbstractContextManager[Decoder]:
        """How this rank runs the model for one token more of each sequence, in evaluation mode. Collective."""

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The weights of all pipeline stages as the forward uses them, in its precision, by name, on the CPU; shards as
        in `gradients`."""

    def of_all_stages(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of this rank's part of the model, by name, with those of other pipeline stages and of experts on
        other ranks."""
        return {name: tensor for part in self.of_each_stage(tensors) for name, tensor in part.items()}

    def of_each_stage(self, own: T) -> list[T]:
        """What each rank brings that holds a part of the model with this one."""
        return everyone(own, self._stages) if self.layout.pp * self.layout.ep > 1 else [own]

    @abstractmethod
    def exported(self) -> Iterator[tuple[str, Tensor | None]]:
        """The tensors of a Hugging Face folder of the model, one after the other, by the folder's names: whole and in
        the precision of the forward on rank 0's CPU, None on all others. Collective in every turn."""

    def expert_biases(self) -> Mapping[int, Tensor]:
        """The bias of each expert, by layer of the whole model from 0, on the CPU; empty without such."""
        return {}

    def routes_of_all(self) -> Routes:
        """`routes`, of the tokens that ran anywhere, on the CPU."""
        routes: Routes = {}
        for of_rank in everyone({key: choices.cpu() for key, choices in self.routes.items()}):
            for key, choices_LK in of_rank.items():
                routes[key] = torch.maximum(choices_LK, routes.get(key, choices_LK))  # -1: had no forward there
        return routes

    def save(self, directory: Path) -> None:
        """Write model and optimizer into an existing empty directory."""
        assert isinstance(self.trained, Weights), "adapters are saved one by one"
        self.trained.save(directory)

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, on any layout the trainer can reshard to."""
        assert isinstance(self.trained, Weights), "adapters are loaded one by one"
        self.trained.load(directory)

    @property
    def adapters(self) -> Adapters:
        """Adapters of the tenants, of a recipe that adapts."""
        assert isinstance(self.trained, Tenants), "the recipe trains weights"
        return self.trained.adapters

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Versions, attention kernel, parameters: what a log line and a benchmark should carry."""

    def close(self) -> None:
        """Release what the host holds; the process group stays."""
        if hasattr(self, "trained"):
            self.trained.close()
        for links in self._links:
            links.close()
        if self._plane is not None:
            self._plane.close()
        self._links, self._plane = (), None

    @property
    @abstractmethod
    def output_layer(self) -> nn.Module | None:
        """What makes logits of the last hidden states; None: another rank has it."""

    @abstractmethod
    def _forwards(self, step: Step, collector: Collector) -> None:
        """All forwards of this rank, without gradients; the last stage gives ``collector`` what it wants."""

    @abstractmethod
    def _open_plane(self) -> Plane:
        """The plane of this rank."""

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages of this rank, ascending."""
        return self.layout.stages_of_device(self.pipeline_stage)

    def execute(self, step: Step, *parts: tuple[Program, StageTrainer]) -> tuple[Slice, ...]:
        """Carry out what this rank does in a step at each of its stages; the slices that it ran."""
        plane, links = self.plane_of(step.plan), self._links or (None,)
        places = [Position(stage, self.dp_cp_rank, link, plane) for stage, link in zip(self.stages, links, strict=True)]
        placed = [(*part, place) for part, place in zip(parts, places, strict=True)]
        return run_programs(step.plan, placed, step.clock, step.mark)

    def plane_of(self, plan: StepPlan) -> Plane | None:
        """What the micro-batches of a plan are shared over; None where it shares none."""
        if not plan.shared:
            return None
        self._plane = self._plane or self._open_plane()
        self._plane.node_ranks = plan.limits.node_ranks
        return self._plane


def _weights_of(labels: Labels | None) -> dict[str, Any]:
    """Fields of `Scores` that the weights of labels fill."""
    weights = labels and labels.weights
    return {"weights": weights.sums, "divisor": weights.set_divisor()} if weights else {}


def _refuse_other_targets(result: StepResult, labels: Labels | None) -> None:
    """Raise EvenloadError, before an update, where other tokens carried loss than its divisor was counted from."""
    if labels is not None and result.num_targets != (counted := int(labels.targets.sum())):
        raise EvenloadError(
            "the labels of the batch have another number of targets than was counted when the data were opened",
            f"{result.num_targets} targets in the labels, {counted} counted",
            "leave the data files alone while they are trained on, and start again",
        )
