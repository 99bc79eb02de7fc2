"""Three tenants in company, each against plain training of it alone: whole sequences, stock layers, textbook LoRA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.recipe.adapter import Adapter, TenantTrain
from evenload.integrations.reference.exactness import relative_error
from evenload.integrations.reference.textbook import AdamW, norm_of
from evenload.integrations.reference.textbook_adapter import Alone
from evenload.runtime.adapters.places import AdapterState
from evenload.runtime.attention.labels import Labels, part_of
from evenload.training.proof.compare import compare_number
from evenload.training.proof.weighing import scale_of

from . import LENGTHS, Found, in_turn, labels_in_turn, tokens

TARGETS = {"gpt": ("query_key_value", "dense_4h_to_h")}
"""Of the second tenant, by family."""
TRAINS = (
    TenantTrain(weight_decay=0.0, clip_grad=0.5),
    TenantTrain(weight_decay=0.2, clip_grad=0.0, betas=(0.8, 0.99)),
    TenantTrain(weight_decay=0.3, clip_grad=1e-3, eps=1e-6),
)
RATES = {0: 1e-2, 1: 3e-3, 2: 5e-2}
TENANTS = (0, 1, 2, 0, 1, 2, 2, 0)
"""Of the sequences of a batch."""


def adapters_of(family: str, dropout: float = 0.0) -> tuple[Adapter, ...]:
    """Of ranks 4, 8 and 16, on other layers, with other scalings, of which two differ from layer to layer."""
    ranks, alphas = {"o_proj": 5, "dense": 5}, {"layers.0.mlp.*": 3.0}
    targets = TARGETS.get(family, ("q_proj", "v_proj", "down_proj"))
    return (
        Adapter(r=4, lora_alpha=8, lora_dropout=dropout),
        Adapter(r=8, target_modules=targets, use_rslora=True, lora_dropout=dropout / 2),
        Adapter(r=16, lora_alpha=32, rank_pattern=ranks, alpha_pattern=alphas),
    )


def joined(host: Any, dropout: float = 0.0, size: float = 0.1) -> list[AdapterState]:
    """Let the three tenants join a host; what they start from. No matrix is zero: ``size`` is that of its elements."""
    starts = []
    adapters = adapters_of(host.recipe.model.family, dropout)
    for number, (adapter, train) in enumerate(zip(adapters, TRAINS, strict=True)):
        host.adapters.join(number, adapter, train)
        drawn = host.adapters.state(number).weights
        host.adapters.leave(number)
        starts.append(AdapterState(_random(drawn, number, size), {}, {}, 0))
        host.adapters.join(number, adapter, train, starts[-1])
    return starts


def _random(drawn: Any, seed: int, size: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(drawn[name].shape, generator=generator, dtype=torch.float64) * size for name in sorted(drawn)
    }


def with_tenants(plan: StepPlan, tenants: Sequence[int] = TENANTS) -> StepPlan:
    return plan.revised(tenants=as_lengths(tenants[: len(plan.lengths)]))


def own_batch(plan: StepPlan, number: int, data: Any, labels: Labels | None) -> tuple[Any, Any, Any]:
    """Tokens, lengths and labels of a tenant's own sequences."""
    places = np.flatnonzero(plan.tenants == number).tolist()
    return lambda i: data(places[i]), plan.lengths[places], part_of(labels, places, number)


def each_alone(host: Any, starts: Sequence[AdapterState], dtype: str | None = None) -> list[Alone]:
    """Plain training of each tenant, in ``dtype``; they share a model, which the first one closes."""
    plain = import_module(f"evenload.integrations.{host.recipe.trainer}.plain").PlainModel(host.recipe, host, dtype)
    adapters, base = adapters_of(host.recipe.model.family), host.weights()
    return [
        Alone(plain, base, adapter, AdamW.of(start.weights, train))
        for adapter, train, start in zip(adapters, TRAINS, starts, strict=True)
    ]


def errors_in_company(
    host: Any,
    alone: Sequence[Alone],
    plans: Iterable[tuple[Any, StepPlan]],
    lengths: Sequence[int] = LENGTHS,
    drawings: int = 0,
) -> list[Found]:
    """Errors of loss, gradients and norm of each tenant under each plan, each with other labels and weights. The plans
    have equal tenants. ``drawings``: as in `errors_of_plans`."""
    rows, data = [], tokens(lengths)
    references: dict[int, Any] = {}
    for step, (name, plan) in enumerate(in_turn(plans, drawings)):
        labels, turn = labels_in_turn(step, lengths, plan.tenants, centred=drawings > 0), step % (drawings or 4)
        result, gradients = host.gradients(plan, data, labels)
        batches = {number: own_batch(plan, number, data, labels) for number in result.tenants}
        if turn not in references:
            references[turn] = {number: alone[number].gradients(*batch) for number, batch in batches.items()}
        for number, (loss, expected) in references[turn].items():
            least = scale_of(batches[number][2], batches[number][1])
            own = {n.partition(".")[2]: g for n, g in gradients.items() if n.startswith(f"{number}.")}
            of_tenant, norm = result.tenants[number], norm_of(expected)
            errors = {n: _error(own[n], expected[n], norm) for n in sorted(own.keys() & expected.keys())}
            rows.append(
                {
                    "plan": name,
                    "tenant": number,
                    "loss": compare_number(of_tenant.loss, loss, least),
                    "grad": max(errors.values()),
                    "worst": max(errors, key=lambda n: errors[n]),
                    "norm": abs(of_tenant.grad_norm / norm - 1),
                    "missing": sorted(own.keys() ^ expected.keys()),
                    "failed": of_tenant.failed,
                }
            )
    return rows


def _error(value: torch.Tensor, wanted: torch.Tensor, whole: float) -> float:
    """Of one matrix; of one whose gradient is zero but for rounding (a query that sees one key), by the whole one's."""
    if float(wanted.norm()) < 1e-9 * whole:
        return float(value.double().norm()) / whole
    return relative_error(value, wanted)


def steps_in_company(
    host: Any,
    starts: Sequence[AdapterState],
    alone: Sequence[Alone],
    plans: Sequence[StepPlan],
    rates: Mapping[int, float] = RATES,
) -> dict[str, Any]:
    """How far adapters, moments, losses and norms are from a textbook's after a step of each plan, and whether a tenant
    without data in one of them keeps every bit."""
    worst = dict.fromkeys(("loss", "norm", "weights", "first", "second"), 0.0)
    kept = True

    def note(what: str, error: float) -> None:
        worst[what] = max(worst[what], error)

    for number, plan in enumerate(plans):
        data, present = tokens(LENGTHS, seed=number), sorted(set(plan.tenants.tolist()))
        resting = {one: host.adapters.state(one) for one in range(len(alone)) if one not in present}
        result = host.train_step(plan, data, lr={tenant: rates[tenant] for tenant in present})
        for tenant in present:
            loss, gradients = alone[tenant].gradients(*own_batch(plan, tenant, data, None))
            norm = alone[tenant].step(gradients, rates[tenant])
            note("loss", abs(result.tenants[tenant].loss / loss - 1))
            note("norm", abs(result.tenants[tenant].grad_norm / norm - 1))
        kept &= all(equal_states(state, host.adapters.state(one)) for one, state in resting.items())
    for tenant, one in enumerate(alone):
        state = host.adapters.state(tenant)
        for name, (weight, first, second) in one.optimizer.states.items():
            start = starts[tenant].weights[name]
            note("weights", relative_error(state.weights[name] - start, weight - start))
            note("first", relative_error(state.first[name], first))
            note("second", relative_error(state.second[name], second))
    return {**worst, "kept": kept, "steps": [host.adapters.state(tenant).steps for tenant in range(len(alone))]}


def equal_states(one: AdapterState, other: AdapterState) -> bool:
    """Whether two states of an adapter are the same, bit by bit."""
    pairs = list(zip(one[:3], other[:3], strict=True))
    return one.steps == other.steps and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
    )
