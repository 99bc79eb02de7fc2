"""A step of a job of tenants: what each of them got in the shared plan, beside what it gets alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.plan.step_plan import StepPlan
from ...core.planning.planner import Planned
from ...integrations.host.trained import StepResult
from ...runtime.adapters.places import AdapterState
from ...runtime.attention.labels import Labels
from ...runtime.attention.pack import TokensOf
from ...runtime.world.agreement import everyone
from ..tenants.arrivals.job import TenantJob
from ..tenants.state.drawing import next_of, own_draws
from .alone import Batch, TenantBeside
from .compare import StepErrors
from .masking import half_masked
from .steps import Proven, failures_of, fields_of_ranks


class ProofStep(NamedTuple):
    """A step to be proved."""

    job: TenantJob
    number: int
    planned: Planned
    base: Mapping[str, Tensor]
    """Weights of the model, which must stay as they are."""

    def labels(self, tokens_of: TokensOf) -> Labels | None:
        """Labels of the step; in every second step half of the targets are masked, where each tenant keeps one."""
        draw = self.planned.draw
        labels = self.job.labels_of(draw)
        if self.number % 2 == 0:
            return labels
        masked = half_masked(labels, tokens_of, draw.samples, draw.lengths, self.job.recipe.train.seed)
        tenants = self.planned.plan.tenants
        return masked if all(masked.targets[tenants == number].any() for number in own_draws(draw)) else labels


def proven_step(step: ProofStep, tenants: Sequence[TenantBeside]) -> Proven:
    """Run a step of the job, and of each of its tenants alone, and compare. Collective."""
    job, plan, draw, captured = step.job, step.planned.plan, step.planned.draw, dict[str, Tensor]()
    here = [one for one in tenants if one.number in own_draws(draw)]
    absent = [(one, job.host.adapters.state(one.number)) for one in tenants if one.number not in own_draws(draw)]
    tokens_of = job.tokens_of(draw)
    labels = step.labels(tokens_of)
    job.watchdog.at("planned step", step.number)
    result = job.host.train_step(
        plan,
        tokens_of,
        lr={one.number: one.tenant.rate for one in here},
        labels=labels,
        mark=lambda where: job.watchdog.at(where, step.number),
        inspect=captured.update,
    )
    errors, wrong = [], 0
    for one in here:
        places = np.flatnonzero(plan.tenants == one.number)
        wrong += int((draw.samples[places] != next_of(one.undisturbed).samples).sum())
        own = {n.partition(".")[2]: g for n, g in captured.items() if n.startswith(f"{one.number}.")}
        with job.watchdog.working(f"plain step of {one.tenant.name}", step.number):
            batch = _own(plan, one.number, tokens_of, labels)
            errors.append(one.compare(job, batch, result.tenants[one.number], own))
    over = [f"{one.tenant.name}, {text}" for one, of in zip(here, errors, strict=True) for text in of.over]
    over += [f"{one.tenant.name} had no data and has changed" for one, state in absent if _changed(job, one, state)]
    over += [f"weight {name} of the base has changed" for name in _moved(job, step.base)]
    job.watchdog.at("comparing", step.number, waits=True)
    return _together(step, result, here, errors, over, wrong)


def _own(plan: StepPlan, number: int, tokens_of: TokensOf, labels: Labels | None) -> Batch:
    """The sequences of one tenant, as a batch of its own."""
    places = np.flatnonzero(plan.tenants == number).tolist()
    own = None if labels is None else Labels(lambda i: labels.of(places[i]), labels.targets[places])
    return lambda i: tokens_of(places[i]), plan.lengths[places], own


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
