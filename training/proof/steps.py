"""Steps of a run, each next to the same step of plain training.

Both start from the same weights and see the same samples, and share nothing else: plain training is the integration's
`PlainModel` (stock code, whole sequences, no plan) with `textbook.AdamW`. In float64 it goes its own way through all
steps. Below float64 it computes its own gradients, which are compared, but is updated by the run's: Adam divides a
gradient by its own size, so that a rounding error of a gradient near zero would become a whole step, and tell nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...core.plan.branches import branches_of
from ...core.plan.step_plan import Lengths, Slice, StepPlan
from ...core.planning.exercised import failure_of
from ...core.planning.planner import Draw
from ...integrations.host.trained import StepResult
from ...integrations.reference.exactness import relative_error
from ...integrations.reference.textbook import AdamW
from ...runtime.attention.labels import count_targets
from ...runtime.world.agreement import everyone
from ...runtime.world.replicas import job_group
from ..drawing import draw_of
from ..hosts import integration
from ..job import Job
from ..replicas import company_of, labels_of_part, tokens_of_part, whole_of
from .compare import StepErrors, Tolerance, compare_gradients, compare_number, compare_update, parts_of
from .masking import half_masked
from .weighing import By, drawn_weights, scale_of

PRECISE = {"fp64": (), "fp32": ("", "fp64"), "bf16": ("bf16", "")}
"""By the precision of a run: in which plain training runs for the floor, and for the reference. Empty: that of the
plain model, which is float32 for both. Float64 has no higher one."""


UNLIKE_TP = 1e-6
"""Relative: what tensor-parallel layers round to float32 in a float64 run differs by their number of ranks."""


class ProofBatch(NamedTuple):
    """What a step trains on."""

    draw: Draw
    plan: StepPlan
    expected: np.ndarray[Any, np.dtype[np.int64]]
    """Numbers of the samples that an undisturbed run has in this step."""
    masked: bool = False
    """Whether about half of its targets carry no loss (`masking`)."""
    weights: By | None = None
    """By what its targets have weights (`weighing`); None: those of the data."""


@dataclass(frozen=True)
class Proven:
    """One step, of all ranks together."""

    loss: float
    loss_rel_err: float
    grad_rel_err: float
    worst_parameter: str
    tolerance: float
    """Of the gradient of that parameter."""
    norm_rel_err: float
    update_rel_err: float
    """Of the weights and of Adam's moments, whichever is worse."""
    sequences: int
    tokens: int
    targets: int
    """Tokens whose loss counts."""
    planner: str
    tokens_missing: int
    tokens_repeated: int
    samples_wrong: int
    """Samples that are not those of an undisturbed run, and samples of which a rank read other tokens."""
    routes_differ: int
    """Choices of experts that plain training has replayed and would not have made."""
    uncompared: tuple[str, ...]
    not_finite: tuple[str, ...]
    over: tuple[str, ...]
    branches: Mapping[str, int]
    failed: tuple[str, ...] = ()
    """Planners, of the step and of its layers, that failed, so that what ran was not theirs."""

    @property
    def exact(self) -> bool:
        counts = self.tokens_missing or self.tokens_repeated or self.samples_wrong
        return not (counts or self.uncompared or self.not_finite or self.over or self.failed)


@dataclass(frozen=True)
class _Judged:
    """What a step's gradients are compared with, and how far they may be off."""

    tolerance: Tolerance
    loss: float
    gradients: Mapping[str, Tensor]
    plain: Any

    @cached_property
    def parts(self) -> dict[str, Tensor]:
        return parts_of(self.plain, self.gradients)

    def passes(self, gradients: Mapping[str, Tensor]) -> bool:
        errors = StepErrors()
        compare_gradients(errors, gradients, self.parts, self.tolerance)
        return not errors.over


@dataclass
class Beside:
    """Plain training next to the run of a job; with another job it goes on where an earlier host was closed.

    ``plain`` is to be closed at the end. All methods are collective, and so is making one.
    """

    job: Job
    textbook: AdamW
    start: Mapping[str, Tensor]
    """Weights before the first step."""
    tolerance: Tolerance
    plain: Any = field(init=False)
    result: StepResult = field(init=False)
    """Of the run's last step."""

    def __post_init__(self) -> None:
        self.plain = integration(self.job.recipe.trainer).PlainModel(self.job.recipe, self.job.host)
        self.plain.load(self._rounded())
        self.job.host.records_routes = self.job.recipe.train.dtype != "fp64"

    @classmethod
    def of(cls, job: Job) -> Beside:
        """At the start of a run. Collective."""
        weights, config = job.host.weights(), job.recipe.train
        tolerance = Tolerance.of(job.recipe.trainer, config.dtype)
        if job.replicas.unlike_tp and config.dtype == "fp64":
            tolerance = replace(tolerance, gradient=UNLIKE_TP, loss=UNLIKE_TP)
        return cls(job, AdamW.of(weights, config), weights, tolerance)

    def step(self, number: int, batch: ProofBatch, lr: float) -> Proven:
        """Run a step of both and compare. Collective."""
        job, errors, captured = self.job, StepErrors(), dict[str, Tensor]()
        job.watchdog.at("planned step", number)
        reader = _Reader(job, batch)
        self.result = result = job.host.train_step(
            batch.plan,
            tokens_of_part(batch.draw, reader),
            lr=lr,
            labels=labels_of_part(batch.draw, reader.labels),
            mark=lambda where: job.watchdog.at(where, number),
            inspect=captured.update,
            company=company_of(batch.draw, reader.labels),
        )
        with job.watchdog.working("plain step", number):
            # In float64 both choose the same experts; below, a rounding error can turn a choice over.
            if job.recipe.train.dtype != "fp64":
                self.plain.replay_routes(job.host)
            lengths = whole_of(batch.draw).lengths
            loss, gradients = self.plain.gradients(reader.expected, lengths, reader.expected_labels)
        judged = _Judged(self.tolerance, loss, gradients, self.plain)
        parts = parts_of(self.plain, captured)
        if PRECISE[job.recipe.train.dtype] and any(everyone(not judged.passes(parts))):
            with job.watchdog.working("measuring the floor of rounding", number):
                judged = self._against_a_floor(lengths, reader, judged)
        compare_gradients(errors, parts, judged.parts, judged.tolerance)
        errors.loss = compare_number(result.loss, judged.loss, reader.least)
        errors.norm = compare_number(result.grad_norm, self.plain.norm(judged.gradients))
        if result.num_targets != (wanted := count_targets(lengths, reader.expected_labels)):
            errors.over.append(f"targets: {result.num_targets:,} counted of {wanted:,}")
        bounds = (("loss", errors.loss, judged.tolerance.loss), ("norm", errors.norm, judged.tolerance.of_norm()))
        errors.over += [f"{what}: {error:.2e}" for what, error, bound in bounds if not error <= bound]
        if not np.isfinite(result.loss):
            errors.not_finite.append("loss")
        if job.recipe.train.dtype != "fp64":
            gradients = dict(job.host.of_all_stages(captured))
        self.textbook.step(gradients, self.plain.norm(gradients), lr)
        errors.over += self.plain.update_routing(job.host)
        self.plain.load(self._rounded())
        states, weights = job.host.trained.optimizer_states(), job.host.weights()
        compare_update(errors, weights, states, self.textbook, self.start, self.tolerance, job.host.trained.frozen)
        if job_group() and len(set(everyone(job.host.trained.digest(), "job"))) > 1:
            errors.over.append("replicas hold different weights")
        job.watchdog.at("comparing", number, waits=True)
        bound = judged.tolerance.of_gradient(errors.gradient.name)
        ran = job.host.dp_cp_rank, result.executed, result.branches
        own = _OfRank(*ran, errors, bound, reader.wrong, sorted(captured), failures_of(batch.plan, result))
        return self._together(batch, own, result, set(gradients))

    def _rounded(self) -> dict[str, Tensor]:
        """Plain training's weights in the precision in which the run's forward uses them."""
        return {name: state.weight.to(self.start[name].dtype) for name, state in self.textbook.states.items()}

    def _against_a_floor(self, lengths: Lengths, reader: _Reader, plain: _Judged) -> _Judged:
        """A reference in a higher precision, and what plain training in the run's own is off from it. Collective."""
        job = self.job
        recipe = job.recipe
        own, higher = PRECISE[recipe.train.dtype]
        results = {"": (plain.loss, plain.gradients)}
        for dtype in (own, higher):
            if dtype:
                model = integration(recipe.trainer).PlainModel(recipe, job.host, dtype=dtype)
                model.load(self._rounded())
                model.route_as(self.plain)
                results[dtype] = model.gradients(reader.expected, lengths, reader.expected_labels)
                model.close()
        loss, gradients = results[higher]
        reference = _Judged(self.tolerance, loss, gradients, self.plain)
        own_loss, own_gradients = results[own][0], parts_of(self.plain, results[own][1])
        off = {name: relative_error(gradient, reference.parts[name]) for name, gradient in own_gradients.items()}
        return replace(reference, tolerance=self.tolerance.measured(compare_number(own_loss, loss, reader.least), off))

    def _together(self, batch: ProofBatch, own: _OfRank, result: StepResult, wanted: set[str]) -> Proven:
        """The step of all ranks. Collective."""
        ranks = everyone(own)
        worst = max(ranks, key=lambda one: one.errors.gradient.error / (one.bound or 1.0))
        executed = {one.dp_cp_rank: one.executed for one in ranks}
        branches = [name for one in ranks for name in one.branches]
        own_step = Proven(
            **fields_of_ranks(batch.plan, result, [one.errors for one in ranks], executed, branches),
            grad_rel_err=worst.errors.gradient.error,
            worst_parameter=worst.errors.gradient.name,
            tolerance=worst.bound,
            routes_differ=self.plain.routes_differ,
            samples_wrong=len(frozenset().union(*(one.wrong for one in ranks))),
            # A pipeline stage has gradients of its own layers alone; together the ranks must have all of them.
            uncompared=tuple(sorted(wanted - {name for one in ranks for name in one.names})),
            over=tuple(sorted({text for one in ranks for text in one.errors.over})),
            failed=tuple(sorted({text for one in ranks for text in one.failed})),
        )
        whole = whole_of(batch.draw).lengths
        return replace(of_replicas(own_step), sequences=len(whole), tokens=int(whole.sum()))


def of_replicas(own: Proven) -> Proven:
    """A step of all replicas, of errors the worst. Collective over the job."""
    if job_group() is None:
        return own
    parts = everyone(own, "job")
    worst = max(parts, key=lambda one: one.grad_rel_err / (one.tolerance or 1.0))
    most = ("loss_rel_err", "norm_rel_err", "update_rel_err", "tokens_missing", "tokens_repeated", "samples_wrong")
    joined = ("uncompared", "not_finite", "over", "failed")
    of_all: dict[str, Any] = {key: max(getattr(one, key) for one in parts) for key in most}
    of_all |= {key: tuple(sorted({text for one in parts for text in getattr(one, key)})) for key in joined}
    names = {name for one in parts for name in one.branches}
    return replace(worst, **of_all, branches={name: max(one.branches.get(name, 0) for one in parts) for name in names})


class _OfRank(NamedTuple):
    dp_cp_rank: int
    executed: tuple[Slice, ...]
    branches: tuple[str, ...]
    errors: StepErrors
    bound: float
    """Of the gradient's error."""
    wrong: set[int]
    names: list[str]
    """Parameters whose gradients it has compared."""
    failed: tuple[str, ...]


class _Reader:
    """Reads samples as training does, and notes every one whose tokens are not those of the expected sample. Where the
    run has drawn other samples altogether, all of them are noted, and the gradients are compared on those that it drew.
    """

    def __init__(self, job: Job, batch: ProofBatch) -> None:
        draw = whole_of(batch.draw)
        in_order = np.array_equal(draw.samples, batch.expected)
        self._samples = batch.expected if in_order else draw.samples
        self._source, self._read = job.source, job.tokens_of(draw)
        self.wrong: set[int] = set() if in_order else set(range(len(draw.samples)))
        undisturbed = draw_of(job.source, self._samples)
        undisturbed = undisturbed._replace(weight=draw.weight, divisor=draw.divisor)
        self.labels, self.expected_labels = job.labels_of(draw), job.labels_of(undisturbed)
        """Which tokens are targets, as training reads it, and as an undisturbed run has it."""
        if batch.masked:
            drawn = self._samples, draw.lengths, job.recipe.train.seed
            self.labels = half_masked(self.labels, self._read, *drawn)
            self.expected_labels = half_masked(self.expected_labels, self.expected, *drawn)
        if batch.weights:
            how = draw.lengths, batch.weights, [job.recipe.train.seed, *self._samples.tolist()]
            self.labels = drawn_weights(self.labels, self._read, *how)
            self.expected_labels = drawn_weights(self.expected_labels, self.expected, *how)
        self.least = scale_of(self.expected_labels, draw.lengths)
        """By what an error of the loss is told at least."""

    def __call__(self, index: int) -> Any:
        tokens = self._read(index)
        if not np.array_equal(tokens, self.expected(index)):
            self.wrong.add(index)
        return tokens

    def expected(self, index: int) -> Any:
        """Tokens of the sample that an undisturbed run has at this place of its batch."""
        return self._source.tokens(int(self._samples[index]))


def failures_of(plan: StepPlan, result: StepResult) -> tuple[str, ...]:
    """What this rank knows of planners that failed in a step."""
    return tuple({text for text in (failure_of(plan), *(load.failed for load in result.expert_loads)) if text})


def count_tokens(plan: StepPlan, executed: list[Slice]) -> tuple[int, int]:
    """(tokens no rank ran, tokens run more than once), of the slices that ranks report."""
    runs = [np.zeros(n, dtype=np.int64) for n in plan.lengths]
    for sequence, trunk in enumerate(plan.trunks.tolist()):  # that the one it continues has run
        runs[sequence][:trunk] = 1
    for s in executed:
        runs[s.sequence][s.start : s.stop] += 1
    return sum(int((r == 0).sum()) for r in runs), sum(int(np.maximum(r - 1, 0).sum()) for r in runs)


def fields_of_ranks(
    plan: StepPlan,
    result: StepResult,
    errors: Sequence[StepErrors],
    executed: Mapping[int, Sequence[Slice]],
    branches: Iterable[str],
) -> dict[str, Any]:
    """Fields of `Proven` that follow from what all ranks say: of errors the worst. ``executed``: by plane rank."""
    missing, repeated = count_tokens(plan, [one for slices in executed.values() for one in slices])
    return {
        "loss": result.loss,
        "loss_rel_err": max(one.loss for one in errors),
        "norm_rel_err": max(one.norm for one in errors),
        "update_rel_err": max(max(one.weight.error, one.moment.error) for one in errors),
        "sequences": len(plan.lengths),
        "tokens": plan.num_tokens,
        "targets": result.num_targets,
        "planner": plan.made_by,
        "tokens_missing": missing,
        "tokens_repeated": repeated,
        "not_finite": tuple(sorted({name for one in errors for name in one.not_finite})),
        "branches": {**dict.fromkeys(branches, 1), **branches_of(plan)},
    }
