"""The adapters of tenants, which a host trains in place of its weights (`runtime.adapters`).

    loss of a step = sum over tenants of (sum of the tenant's token losses / its target tokens)

(where targets have weights, each loss times its weight / what the weights of the tenant's targets add up to, or a
divisor that is given for the tenant)
so each tenant's gradient is that of its own mean loss, whoever else is in the step, since no token's loss depends on
another tenant's adapter. Its norm, clip, rate and update are its own, too. A tenant whose loss, gradient or rate is not
finite, or whose data has other targets than were counted, is not updated, and named; it changes nothing for the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.branches import SUM_AFTER_PASSES
from ...core.plan.step_plan import StepPlan
from ...runtime.adapters.adapters import Adapters
from ...runtime.adapters.company import Company, Divided
from ...runtime.attention.copy_rows import ToHost
from ...runtime.attention.labels import Labels
from ...runtime.world.replicas import commit
from ..reference.textbook import AdamState
from .scoring import LossCollector, Scores, scores_of
from .step import Step
from .trained import PassResult, StepResult, TenantResult, Trainable


def company_of(plan: StepPlan, labels: Labels | None) -> Company:
    """All sequences of a plan. Raises EvenloadError for a plan without tenants."""
    if not len(plan.tenants):
        what = "a plan without tenants reached a host that trains adapters"
        raise EvenloadError(what, f"{len(plan.lengths)} sequences", "plan draws whose sequences have tenants")
    return Company.of(plan.tenants, plan.lengths, labels)


class Tenants(Trainable):
    """The adapters of tenants; a subclass makes `adapters`. ``passes``: this rank's, through the frozen model; their
    losses go to the collector."""

    adapters: Adapters

    def __init__(self, device: torch.device, passes: Callable[[Step, LossCollector], PassResult]) -> None:
        self._device, self._passes = device, passes
        self._results: dict[int, TenantResult] = {}
        """Of the tenants of the last step; the update adds who fails in it."""

    def begin(self, plan: StepPlan) -> None:
        self.adapters.begin(plan.tenants)

    def run(self, step: Step) -> StepResult:
        plan, clock = step.plan, step.clock
        company = step.company or company_of(plan, step.labels)
        divisors = company.divisors
        self.adapters.begin(company.tenants, company.places)
        collector = LossCollector(len(plan.lengths), self._device)
        executed, branches = self._passes(step, collector)
        step.mark("gradient sum")
        with clock.noting("G"):
            tenants = self._of_tenants(company, divisors, collector.summed())
        busy, branches = clock.read(), (SUM_AFTER_PASSES, *branches)
        count = sum(one.num_targets for one in tenants.values())
        return StepResult(self._loss(), count, busy.total_s, busy.forward_s, executed, branches, tenants=tenants)

    def _of_tenants(self, company: Company, divisors: Mapping[int, Divided], summed: ToHost) -> dict[int, TenantResult]:
        """Sum the gradients, divide each by its tenant's divisor, and say what came of each tenant. Collective. Passes
        run with the plain sum of token losses: a divisor inside them would be rounded with every token."""
        numbers, weights = sorted(divisors), company.weights
        self.adapters.sum_gradients({number: one.divisor for number, one in divisors.items()})
        norms = self.adapters.norms(numbers)  # with which the losses have come
        scores = scores_of(summed, company)
        norms = commit(norms)  # the first replica's on all: another one adds up in another order
        self._results = {}
        for number in numbers:
            own, (count, divisor) = company.tenants == number, divisors[number]
            loss, norm = float(scores.losses[own].sum()) / (divisor or 1), norms[number]
            values = ("loss", loss), ("gradient", norm), ("sum of weights", divisor)
            bad = [what for what, value in values if not math.isfinite(value)]
            failed = f"not finite: {', '.join(bad)}" if bad else ""
            if count and not divisor:
                failed = f"the weights of its {count} targets add up to 0"
            if (seen := int(scores.targets[own].sum())) != count:
                failed = f"the data has changed: {seen} targets in the step, {count} counted"
            own_scores = Scores(scores.losses[own], scores.targets[own])
            if weights:
                own_scores = own_scores._replace(weights=weights.sums[own], divisor=weights.set_divisor(number))
            self._results[number] = TenantResult(loss, count, norm, own_scores, failed)
        return self._results

    def _loss(self) -> float:
        """The mean loss of a target token over the tenants of the last step that did not fail."""
        good = [result for result in self._results.values() if not result.failed]
        count = sum(result.num_targets for result in good)
        return sum(result.loss * result.num_targets for result in good) / count if count else math.nan

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of every tenant of the last step, by ``<number>.<matrix>``, whole."""
        return {
            f"{number}.{name}": g for number in self._results for name, g in self.adapters.gradients(number).items()
        }

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        return math.hypot(*(result.grad_norm for result in self._results.values() if not result.failed))

    def update(self, lr: Any) -> float:
        for number, result in self._results.items():
            if not math.isfinite(lr[number]) and not result.failed:
                self._results[number] = result._replace(failed="not finite: learning rate")
        good = {number: result.grad_norm for number, result in self._results.items() if not result.failed}
        self.adapters.update({number: lr[number] for number in good}, good)
        return self.norm({})

    def optimizer_states(self) -> dict[str, AdamState]:
        """States of every tenant that is here, by ``<number>.<matrix>``, whole."""
        states = {number: self.adapters.state(number) for number in self.adapters.numbers}
        return {
            f"{number}.{name}": AdamState(weight, state.first[name], state.second[name])
            for number, state in states.items()
            for name, weight in state.weights.items()
        }

    def digest(self) -> int:
        return self.adapters.digest()

    def describe(self) -> dict[str, Any]:
        return {"adapted_linears": len(self.adapters.linears)}

    def close(self) -> None:
        if hasattr(self, "adapters"):
            self.adapters.close()
