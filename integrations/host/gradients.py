"""Gradients of samples, for selections by gradient (LESS, arXiv 2402.04333), by a model that is being trained.

    g_s = d (mean loss of s) / d (A, B)        low-rank matrices on the linear layers, fresh: A drawn, B zero
    projected = R g_s                          R: signs, a hash; see `runtime.adapters.projection`
    along u:  g_s . u  =  (loss_s(theta + e u) - loss_s(theta - e u)) / 2 e  + O(e^2)

One backward of each pack gives the gradients of all its samples, cut ones too, in whatever order, layout or ZeRO stage
a plan runs. The base gets no gradient meanwhile; weights, gradients, optimizer and random states stay as they are. A
direction needs no backward: the matrices move along it, and plans run forward twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...core.aliases import Floats
from ...core.errors import refuse_first
from ...core.plan.step_plan import StepPlan
from ...core.recipe.adapter import Adapter, TenantTrain
from ...core.recipe.policies import rules_of_gradients
from ...core.recipe.recipe import Recipe
from ...runtime.adapters.by_sample import SampleGradients
from ...runtime.adapters.peers import AdapterPeers
from ...runtime.adapters.places import AdaptedBlock, AdapterState
from ...runtime.attention.labels import Labels
from ...runtime.attention.pack import TokensOf
from ...runtime.measure.busy import BusyClock
from .scoring import LossCollector, Scores
from .step import Mark, Step, no_mark
from .trained import Weights

_FIRST_STEP, _FALL, _STEPS = 1.0, 4.0, 12
"""Of the search for a step: over the direction's norm, by what it falls, and how often at most."""

_ENOUGH = 1e-5
"""Differences below are less than anybody asks for."""
_SETTLED = 0.05
"""Beyond such a difference steps are too large to tell anything."""

Method = Literal["backward", "forwards"]


class FrozenModel(NamedTuple):
    """A rank's part of a model without gradients of its own, for as long as a host says."""

    blocks: Sequence[AdaptedBlock]
    linears: Sequence[str]
    """Names of all linear layers of the model, those of other stages too."""
    peers: AdapterPeers
    dtype: torch.dtype
    """Of matrices and their gradients."""
    passes: Callable[[Step, LossCollector], object]
    """All passes of this rank in a step, of the plain sum of token losses."""


class PlannedSamples(NamedTuple):
    """Samples with the plan that runs them."""

    plan: StepPlan
    tokens_of: TokensOf
    labels: Labels | None = None
    """Which tokens are targets; None: each but the first of a sequence."""


class GradientSettings(NamedTuple):
    """By what matrices gradients are taken, and what becomes of them."""

    adapter: Adapter = Adapter()
    columns: int = 4096
    """k, of what is projected."""
    seed: int = 0
    """Of the signs."""
    mean: bool = True
    """Of the mean loss of a sample's targets (by their weights); else of the sum."""
    state: AdapterState | None = None
    """An adapter that has been trained on this base, in place of fresh matrices."""
    train: TenantTrain = TenantTrain()
    """Its ``seed`` draws fresh matrices; ``betas`` and ``eps`` are Adam's."""


class Along(NamedTuple):
    """The products of gradients with one direction."""

    products: Floats
    """float64 [N], in the order of the samples."""
    method: Method
    """What was cheaper, or asked for."""
    step: float
    """e of the two forwards, 0 where there were none."""
    differs: float
    """By what the products at this step differ from those at one four times as large, relative; an estimate of the
    error. Not a number where there were no forwards."""
    seconds: dict[Method, float]
    """Of one batch by each method, where both were tried: the longest of all ranks."""


class GradientHost(Protocol):
    """What gradients of samples ask of a host, see `Host`."""

    recipe: Recipe
    dp_cp_rank: int
    device: torch.device

    @property
    def trained(self) -> Any: ...

    def score(self, plan: StepPlan, tokens_of: TokensOf, *, labels: Labels | None = None) -> Scores: ...

    def frozen_model(self) -> AbstractContextManager[FrozenModel]: ...


class GradientScores:
    """Takes gradients of samples as long as its host's `gradient_scores` is open. All methods are collective."""

    def __init__(self, host: GradientHost, frozen: FrozenModel, settings: GradientSettings) -> None:
        self._host, self._settings = host, settings
        self._passes = frozen.passes
        self._rows = SampleGradients(frozen.blocks, frozen.linears, frozen.peers, frozen.dtype, host.device)
        adapter = settings.adapter.model_copy(update={"lora_dropout": 0.0})
        try:
            self._rows.take(adapter, settings.train, settings.state)
        except BaseException:
            self._rows.close()
            raise

    def close(self) -> None:
        """Take the hooks off and drop the matrices."""
        self._rows.close()

    def projected(self, samples: PlannedSamples, *, adam: bool = False, mark: Mark = no_mark) -> tuple[Floats, Scores]:
        """The projected gradient of each sample [N, k] and its loss, the same on every rank; zeros where a sample has
        no target. ``adam``: Adam's direction from the state's moments in place of the gradient."""
        with self._gradients(samples, mark) as scores:
            if adam:
                self._rows.gather()
                self._rows.precondition()
            rows = self._rows.projected(self._settings.columns, self._settings.seed)
        return rows.cpu().numpy(), scores

    def of_pool(self, batches: Iterable[PlannedSamples], *, adam: bool = False) -> Floats:
        """The projected gradients of all samples of batches, in their order [N, k]: what `Pool.gradients` takes."""
        return np.concatenate([self.projected(samples, adam=adam)[0] for samples in batches])

    def direction(self, batches: Sequence[PlannedSamples]) -> Tensor:
        """The mean of the samples' gradients, each over its norm, as the matrices of this rank lie."""
        count = sum(len(one.plan.lengths) for one in batches)
        parts = []
        for samples in batches:
            with self._gradients(samples, no_mark):
                self._rows.gather()
                parts.append(self._rows.mean_direction(self._rows.norms_of_rows(), count))
        return torch.stack(parts).sum(0)

    def along(self, direction: Tensor, batches: Sequence[PlannedSamples], method: Method | None = None) -> Along:
        """The product of each sample's gradient with a direction; without a method the cheaper, by the seconds
        of the second batch, which both run; of fewer than three batches the backward."""
        if method is None and len(batches) < 3:
            method = "backward"
        step, differs = (0.0, math.nan) if method == "backward" else self._chosen_step(direction, batches[0])
        methods: dict[Method, Callable[[PlannedSamples], Floats]] = {
            "backward": partial(self._by_backward, direction),
            "forwards": partial(self._by_forwards, step, direction),
        }
        parts: list[Floats] = []
        seconds: dict[Method, float] = {}
        if method is None:
            parts.append(methods["backward"](batches[0]))
            tried = {name: self._timed(run, batches[1]) for name, run in methods.items()}
            seconds = {name: spent for name, (spent, _) in tried.items()}
            method = "forwards" if seconds["forwards"] < seconds["backward"] else "backward"
            parts.append(tried[method][1])
        parts += [methods[method](one) for one in batches[len(parts) :]]
        return Along(np.concatenate(parts), method, step, differs, seconds)

    def _by_backward(self, direction: Tensor, samples: PlannedSamples) -> Floats:
        with self._gradients(samples, no_mark):
            products: Floats = self._rows.products(direction).cpu().numpy()
        return products

    def _by_forwards(self, step: float, direction: Tensor, samples: PlannedSamples) -> Floats:
        ahead, behind = (self._losses(sign * step, direction, samples) for sign in (1, -1))
        products: Floats = (ahead - behind) / (2 * step)
        return products

    def _chosen_step(self, direction: Tensor, samples: PlannedSamples) -> tuple[float, float]:
        """A step and its difference: of steps that fall, the first one that hardly differs from the one before, or the
        last one that differs less than those before it did; then rounding weighs more than what a smaller one mends."""
        step = _FIRST_STEP / (self._rows.norm_of(direction) or 1.0)
        best, before = math.inf, self._by_forwards(step, direction, samples)
        for _ in range(_STEPS):
            now = self._by_forwards(step / _FALL, direction, samples)
            differs = float(np.linalg.norm(now - before) / (np.linalg.norm(now) or 1.0))
            if not differs < best and best < _SETTLED:
                break
            step, best, before = step / _FALL, differs, now
            if best < _ENOUGH:
                break
        return step, best

    def _losses(self, step: float, direction: Tensor, samples: PlannedSamples) -> Floats:
        self._rows.move(step, direction, len(samples.plan.lengths))
        try:
            scores = self._host.score(samples.plan, samples.tokens_of, labels=samples.labels)
        finally:
            self._rows.move(0.0, direction, 0)
        divisors = self._divisors(scores)
        losses: Floats = scores.losses / np.where(divisors == 0, 1, divisors)
        return losses

    def _divisors(self, scores: Scores) -> Floats:
        if not self._settings.mean:
            return np.ones(len(scores.targets))
        return scores.targets.astype(np.float64) if scores.weights is None else scores.weights

    @contextmanager
    def _gradients(self, samples: PlannedSamples, mark: Mark) -> Iterator[Scores]:
        """Inside, there are the rows of the samples' gradients."""
        plan, tokens_of, labels = samples
        collector = LossCollector(len(plan.lengths), self._host.device)
        self._rows.begin_rows(plan, self._host.dp_cp_rank)
        try:
            self._passes(Step(plan, tokens_of, labels, mark, BusyClock(self._host.device)), collector)
            scores = collector.scores()
            scores = scores._replace(weights=labels.weights.sums if labels and labels.weights else None)
            self._rows.divide(torch.from_numpy(self._divisors(scores)).to(self._host.device))
            yield scores
        finally:
            self._rows.end_rows()

    def _timed(self, run: Callable[[PlannedSamples], Floats], samples: PlannedSamples) -> tuple[float, Floats]:
        begin = time.perf_counter()
        values = run(samples)
        spent = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=self._host.device)
        if dist.is_initialized():
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        return float(spent), values


@contextmanager
def opened(host: GradientHost, settings: GradientSettings) -> Iterator[GradientScores]:
    """The gradients of samples of a host, as `Host.gradient_scores` gives them."""
    refuse_first(
        (
            not isinstance(host.trained, Weights),
            "gradients of samples are those of a model whose weights are trained, and this recipe trains adapters",
            "a host of tenants",
            "disable the plugin that trains adapters",
        ),
        *rules_of_gradients(host.recipe),
        (
            settings.columns < 1,
            "gradients are projected to no column",
            f"columns {settings.columns}",
            "take 1,000 or more: inner products are off by about 1 / sqrt(columns)",
        ),
    )
    with host.frozen_model() as frozen:
        scores = GradientScores(host, frozen, settings)
        try:
            yield scores
        finally:
            scores.close()
