"""A tenant of a shared plan beside plain training of it alone.

Alone, a tenant's product is part of the weights of the integration's `PlainModel` (stock code, whole sequences, no
plan, no hook), and its matrices' gradients follow from the weights' own (`integrations.reference.textbook_adapter`).
Below float64 it computes its own gradients, which are compared, and is updated by the job's, as in `steps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ...core.plan.step_plan import Lengths
from ...core.recipe.adapter import Adapter
from ...integrations.host.trained import TenantResult
from ...integrations.reference.exactness import relative_error
from ...integrations.reference.textbook import AdamState, AdamW, norm_of
from ...integrations.reference.textbook_adapter import Alone
from ...runtime.adapters.places import AdapterState
from ...runtime.attention.labels import Labels
from ...runtime.attention.pack import TokensOf
from ...runtime.world.agreement import everyone
from ..drawing import Drawing
from ..hosts import integration
from ..tenants.arrivals.job import TenantJob
from ..tenants.state.tenant import ActiveTenant
from .compare import StepErrors, Tolerance, compare_gradients, compare_number, compare_update
from .steps import PRECISE

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
        errors.loss = compare_number(result.loss, loss)
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
        return loss, gradients, self.tolerance.measured(compare_number(own_loss, loss), off)
