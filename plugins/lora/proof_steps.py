"""A step of a job of tenants: what each of them got in the shared plan, against plain training of it alone.

Alone, a tenant's product is part of the weights of the integration's `PlainModel` (stock code, whole sequences, no
plan, no hook), and its matrices' gradients follow from the weights' own (`integrations.reference.textbook_adapter`).
Below float64 it computes its own gradients, which are compared, and is updated by the job's, as in `steps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.plan.step_plan import Lengths
from ...core.planning.planner import Draw, Planned
from ...core.recipe.adapter import Adapter
from ...integrations.host.trained import StepResult, TenantResult
from ...integrations.reference.exactness import relative_error
from ...integrations.reference.textbook import AdamState, AdamW, norm_of
from ...integrations.reference.textbook_adapter import Alone
from ...runtime.adapters.places import AdapterState
from ...runtime.attention.labels import Labels, part_of
from ...runtime.attention.pack import TokensOf
from ...runtime.world.agreement import everyone
from ...training.drawing import Drawing
from ...training.hosts import integration
from ...training.proof.compare import StepErrors, Tolerance, compare_gradients, compare_number, compare_update
from ...training.proof.masking import half_masked
from ...training.proof.steps import PRECISE, UNLIKE_TP, Proven, failures_of, fields_of_ranks, of_replicas
from ...training.proof.weighing import KINDS, drawn_weights, scale_of
from ...training.replicas import company_of, labels_of_part, tokens_of_part, whole_of
from .arrivals.job import TenantJob
from .state.drawing import next_of, own_draws
from .state.tenant import ActiveTenant

Batch = tuple[TokensOf, Lengths, Labels | None]
"""Tokens, lengths and labels of a tenant's own sequences."""


@dataclass
class TenantBeside:
    """A tenant in the shared plan, and alone."""

    tenant: ActiveTenant
    undisturbed: Drawing
    """Its batches, as it would draw them alone."""
    alone: Alone
    start: Mapping[str, Tensor]
    tolerance: Tolerance
    state: AdapterState
    """Its adapter, between two trainers."""
    errors: list[StepErrors] = field(default_factory=list)
    """Of each of its steps."""
    allowed: float = 0.0
    """Of the worst gradient of its last step."""

    @classmethod
    def of(
        cls, tenant: ActiveTenant, drawing: Drawing, adapter: Adapter, start: Mapping[str, Tensor], job: TenantJob
    ) -> TenantBeside:
        alone = Alone(None, job.host.weights(), adapter, AdamW.of(start, tenant.config.train))
        tolerance = Tolerance.of(job.recipe.trainer, job.recipe.train.dtype)
        if job.replicas.unlike_tp:
            least = {key: max(getattr(tolerance, key), UNLIKE_TP) for key in ("gradient", "loss", "update")}
            tolerance = replace(tolerance, **least)
        return cls(tenant, drawing, alone, start, tolerance, AdapterState(start, {}, {}, 0))

    @property
    def number(self) -> int:
        return self.tenant.number

    def row(self) -> dict[str, Any]:
        """What the proof says of it, of all steps the worst."""
        worst = max((errors.gradient for errors in self.errors), default=StepErrors().gradient)
        return {
            "name": self.tenant.name,
            "r": self.tenant.adapter.r,
            "steps": len(self.errors),
            "loss_rel_err": max((errors.loss for errors in self.errors), default=0.0),
            "grad_rel_err": worst.error,
            "worst_parameter": worst.name,
            "update_rel_err": max((max(e.weight.error, e.moment.error) for e in self.errors), default=0.0),
            "exact": not any(errors.over or errors.not_finite for errors in self.errors),
        }

    def compare(
        self, job: TenantJob, batch: Batch, result: TenantResult, gradients: Mapping[str, Tensor]
    ) -> StepErrors:
        """One step of it in the shared plan, with what it is alone. Collective."""
        errors, dtype = StepErrors(), job.recipe.train.dtype
        expected: Mapping[str, Tensor]
        loss, expected = self.alone.gradients(*batch)
        tolerance = self.tolerance
        compare_gradients(errors, gradients, expected, tolerance)
        if PRECISE[dtype] and any(everyone(bool(errors.over))):
            errors = StepErrors()
            loss, expected, tolerance = self._against_a_floor(job, batch, (loss, expected))
            compare_gradients(errors, gradients, expected, tolerance)
        self.allowed = tolerance.of_gradient(errors.gradient.name)
        errors.loss = compare_number(result.loss, loss, scale_of(batch[2], batch[1]))
        errors.norm = compare_number(result.grad_norm, norm_of(expected))
        bounds = (("loss", errors.loss, tolerance.loss), ("norm", errors.norm, tolerance.of_norm()))
        errors.over += [f"{what}: {error:.2e}" for what, error, bound in bounds if not error <= bound]
        errors.over += [f"no gradient of {name}" for name in sorted(expected.keys() - gradients.keys())]
        errors.over += [result.failed] if result.failed else []
        self.alone.step(expected if dtype == "fp64" else gradients, self.tenant.rate)
        self.tenant.step += 1
        state = job.host.adapters.state(self.number)
        states = {n: AdamState(w, state.first[n], state.second[n]) for n, w in state.weights.items()}
        compare_update(errors, state.weights, states, self.alone.optimizer, self.start, self.tolerance)
        self.errors.append(errors)
        return errors

    def _against_a_floor(
        self, job: TenantJob, batch: Batch, plain: tuple[float, Mapping[str, Tensor]]
    ) -> tuple[float, Mapping[str, Tensor], Tolerance]:
        """A reference in a higher precision, and what plain training in the job's own is off from it. Collective."""
        own, higher = PRECISE[job.recipe.train.dtype]
        results: dict[str, tuple[float, Mapping[str, Tensor]]] = {"": plain}
        for dtype in (own, higher):
            if dtype:
                model = integration(job.recipe.trainer).PlainModel(job.recipe, job.host, dtype=dtype)
                results[dtype] = replace(self.alone, plain=model).gradients(*batch)
                model.close()
        (own_loss, own_gradients), (loss, gradients) = results[own], results[higher]
        off = {name: relative_error(gradient, gradients[name]) for name, gradient in own_gradients.items()}
        return (
            loss,
            gradients,
            self.tolerance.measured(compare_number(own_loss, loss, scale_of(batch[2], batch[1])), off),
        )


class ProofStep(NamedTuple):
    """A step to be proved."""

    job: TenantJob
    number: int
    planned: Planned
    base: Mapping[str, Tensor]
    """Weights of the model, which must stay as they are."""
    weighs: bool
    """Whether targets have drawn weights in the loss."""

    @property
    def batch(self) -> Draw:
        """All sequences of the step, on all replicas."""
        return whole_of(self.planned.draw)

    def labels(self, tokens_of: TokensOf) -> Labels | None:
        """Labels of the batch; in every second step half of the targets are masked, where each tenant keeps one."""
        draw, seed = self.batch, self.job.recipe.train.seed
        labels, tenants = self.job.labels_of(draw), draw.tenants
        assert tenants is not None
        if self.number % 2:
            masked = half_masked(labels, tokens_of, draw.samples, draw.lengths, seed)
            keeps = all(masked.targets[tenants == number].any() for number in own_draws(draw))
            labels = masked if keeps else labels
        if self.weighs:
            seeds = [seed, *draw.samples.tolist()]
            labels = drawn_weights(labels, tokens_of, draw.lengths, KINDS[self.number % len(KINDS)], seeds, tenants)
        return labels


def proven_step(step: ProofStep, tenants: Sequence[TenantBeside]) -> Proven:
    """Run a step of the job, and of each of its tenants alone, and compare. Collective."""
    job, plan, draw, captured = step.job, step.planned.plan, step.batch, dict[str, Tensor]()
    here = [one for one in tenants if one.number in own_draws(draw)]
    absent = [(one, job.host.adapters.state(one.number)) for one in tenants if one.number not in own_draws(draw)]
    tokens_of = job.tokens_of(draw)
    labels = step.labels(tokens_of)
    job.watchdog.at("planned step", step.number)
    result = job.host.train_step(
        plan,
        tokens_of_part(step.planned.draw, tokens_of),
        lr={one.number: one.tenant.rate for one in here},
        labels=labels_of_part(step.planned.draw, labels),
        mark=lambda where: job.watchdog.at(where, step.number),
        inspect=captured.update,
        company=company_of(step.planned.draw, labels),
    )
    errors, wrong = [], 0
    for one in here:
        places = np.flatnonzero(draw.tenants == one.number)
        wrong += int((draw.samples[places] != next_of(one.undisturbed).samples).sum())
        own = {n.partition(".")[2]: g for n, g in captured.items() if n.startswith(f"{one.number}.")}
        with job.watchdog.working(f"plain step of {one.tenant.name}", step.number):
            batch = _own(draw, one.number, tokens_of, labels)
            errors.append(one.compare(job, batch, result.tenants[one.number], own))
    over = [f"{one.tenant.name}, {text}" for one, of in zip(here, errors, strict=True) for text in of.over]
    over += [f"{one.tenant.name} had no data and has changed" for one, state in absent if _changed(job, one, state)]
    over += [f"weight {name} of the base has changed" for name in _moved(job, step.base)]
    job.watchdog.at("comparing", step.number, waits=True)
    if len(set(everyone(job.host.adapters.digest(), "job"))) > 1:
        over.append("replicas hold different adapters")
    lengths = step.batch.lengths
    whole = of_replicas(_together(step, result, here, errors, over, wrong))
    return replace(whole, sequences=len(lengths), tokens=int(lengths.sum()))


def _own(draw: Draw, number: int, tokens_of: TokensOf, labels: Labels | None) -> Batch:
    """The sequences of one tenant, as a batch of its own."""
    places = np.flatnonzero(draw.tenants == number).tolist()
    return lambda i: tokens_of(places[i]), draw.lengths[places], part_of(labels, places, number)


def _changed(job: TenantJob, one: TenantBeside, before: AdapterState) -> bool:
    after = job.host.adapters.state(one.number)
    pairs = [(old[name], new[name]) for old, new in zip(before[:3], after[:3], strict=True) for name in old]
    return before.steps != after.steps or not all(torch.equal(old, new) for old, new in pairs)


def _moved(job: TenantJob, base: Mapping[str, Tensor]) -> list[str]:
    return [name for name, weight in job.host.weights().items() if not torch.equal(weight, base[name])]


def _together(
    step: ProofStep,
    result: StepResult,
    here: Sequence[TenantBeside],
    errors: Sequence[StepErrors],
    over: list[str],
    wrong: int,
) -> Proven:
    """The step of all ranks and tenants. Collective."""
    plan = step.planned.plan
    worst = max(zip(here, errors, strict=True), key=lambda pair: pair[1].gradient.error)
    own = step.job.host.dp_cp_rank, result.executed, result.branches, over, errors
    ranks = everyone(own)
    all_errors = [one for rank in ranks for one in rank[4]]
    executed, branches = {rank[0]: rank[1] for rank in ranks}, [name for rank in ranks for name in rank[2]]
    return Proven(
        **fields_of_ranks(plan, result, all_errors, executed, branches),
        grad_rel_err=worst[1].gradient.error,
        worst_parameter=f"{worst[0].tenant.name}, {worst[1].gradient.name}",
        tolerance=worst[0].allowed,
        samples_wrong=wrong,
        routes_differ=0,
        uncompared=(),
        over=tuple(sorted({text for rank in ranks for text in rank[3]})),
        failed=failures_of(plan, result),
    )
