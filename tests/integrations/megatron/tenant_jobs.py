"""What the ranks of test_tenants.py do: three tenants in company against each trained alone, and planted faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from evenload.core.laws import check
from evenload.core.plan.step_plan import Op, StepPlan, as_lengths
from evenload.core.recipe.adapter import Adapter
from evenload.core.recipe.tenant import TenantTrain
from evenload.integrations.megatron import PlainModel
from evenload.integrations.reference.exactness import largest_error, relative_error
from evenload.integrations.reference.textbook import AdamW
from evenload.integrations.reference.textbook_adapter import Alone
from evenload.runtime.adapters.places import AdapterState
from evenload.runtime.attention.labels import Labels, part_of
from megatron_tests.jobs import hosted, labels_in_turn, tokens
from megatron_tests.shared_jobs import sharing
from megatron_tests.shared_plans import HAND_LENGTHS as LENGTHS
from megatron_tests.slice_jobs import planned

TARGETS = {"gpt": ("query_key_value", "dense_4h_to_h")}
"""Of the second tenant, by family."""


def adapters_of(family: str, dropout: float = 0.0) -> tuple[Adapter, ...]:
    """Of ranks 4, 8 and 16, on other layers, with other scalings, of which two differ from layer to layer."""
    ranks, alphas = {"o_proj": 5, "dense": 5}, {"layers.0.mlp.*": 3.0}
    targets = TARGETS.get(family, ("q_proj", "v_proj", "down_proj"))
    return (
        Adapter(r=4, lora_alpha=8, lora_dropout=dropout),
        Adapter(r=8, target_modules=targets, use_rslora=True, lora_dropout=dropout / 2),
        Adapter(r=16, lora_alpha=32, rank_pattern=ranks, alpha_pattern=alphas),
    )


TRAINS = (
    TenantTrain(weight_decay=0.0, clip_grad=0.5),
    TenantTrain(weight_decay=0.2, clip_grad=0.0, betas=(0.8, 0.99)),
    TenantTrain(weight_decay=0.3, clip_grad=1e-3, eps=1e-6),
)
RATES = {0: 1e-2, 1: 3e-3, 2: 5e-2}
TENANTS = (0, 1, 2, 0, 1, 2, 2, 0)
"""Of the sequences of a batch."""


@contextmanager
def company(world: Any, *, dropout: float = 0.0, **changes: Any) -> Iterator[tuple[Any, list[AdapterState]]]:
    """A host on which the three tenants train, and what they start from: no matrix is zero."""
    with hosted(world, plugins__lora={"enabled": True}, **changes) as host:
        starts = []
        for number, adapter in enumerate(adapters_of(host.recipe.model.family, dropout)):
            host.adapters.join(number, adapter, TRAINS[number])
            starts.append(AdapterState(_random(host.adapters.state(number).weights, number), {}, {}, 0))
        join_anew(host, starts, dropout)
        yield host, starts


def join_anew(host: Any, starts: list[AdapterState], dropout: float = 0.0) -> None:
    """The tenants leave, and begin again."""
    for number, adapter in enumerate(adapters_of(host.recipe.model.family, dropout)):
        host.adapters.leave(number)
        host.adapters.join(number, adapter, TRAINS[number], starts[number])


def _random(drawn: Any, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(drawn[name].shape, generator=generator, dtype=torch.float64) * 0.1 for name in sorted(drawn)
    }


def plan_of(
    host: Any, which: str | int, lengths: Any = LENGTHS, tenants: Any = TENANTS, *, splits: bool = False, **drawn: Any
) -> StepPlan:
    """By name or seed; seeds of 100 and more, and names, are of shared micro-batches. ``splits``: the weight gradients
    of every second pass are a pass of their own, behind all others."""
    shares = isinstance(which, str) or which >= 100
    plan = sharing(host, which, lengths) if shares else planned(host, which, lengths, **drawn)
    if splits:
        last = [[Op("W", op.micro_batch) for op in row if op.kind == "B"][::2] for row in plan.order]
        order = tuple((*row, *later) for row, later in zip(plan.order, last, strict=True))
        plan = check(plan.revised(order=order, limits=replace(plan.limits, splits_backward=True)))
    return plan.revised(tenants=as_lengths(tenants[: len(plan.lengths)]))


def own_batch(plan: StepPlan, number: int, data: Any, labels: Labels | None) -> tuple[Any, Any, Any]:
    """Tokens, lengths and labels of a tenant's own sequences."""
    places = np.flatnonzero(plan.tenants == number).tolist()
    return lambda i: data(places[i]), plan.lengths[places], part_of(labels, places)


def each_alone(host: Any, starts: list[AdapterState]) -> list[Alone]:
    """Plain training of each tenant; they share a model."""
    plain, base = PlainModel(host.recipe, host), host.weights()
    adapters = adapters_of(host.recipe.model.family)
    return [
        Alone(plain, base, adapter, AdamW.of(start.weights, train))
        for adapter, train, start in zip(adapters, TRAINS, starts, strict=True)
    ]


def in_company(
    world: Any, *, plans: list[str | int], drawn: dict[str, Any] | None = None, lengths: Any = LENGTHS, **changes: Any
) -> list[dict[str, Any]]:
    """Errors of loss and gradients of each tenant under each plan, each with other labels and weights."""
    rows = []
    with company(world, **changes) as (host, starts):
        before, alone = host.weights(), each_alone(host, starts)
        references: dict[Any, Any] = {}
        for turn, which in enumerate(plans):
            plan, data = plan_of(host, which, lengths, **(drawn or {})), tokens(lengths)
            labels = labels_in_turn(turn, lengths, plan.tenants)
            result, gradients = host.gradients(plan, data, labels)
            key = turn % 4
            if key not in references:
                batches = [own_batch(plan, number, data, labels) for number in range(len(alone))]
                references[key] = [one.gradients(*batch) for one, batch in zip(alone, batches, strict=True)]
            for number, (loss, expected) in enumerate(references[key]):
                own = {n.partition(".")[2]: g for n, g in gradients.items() if n.startswith(f"{number}.")}
                rows.append(
                    {
                        "plan": which,
                        "tenant": number,
                        "loss": abs(result.tenants[number].loss / loss - 1),
                        "grad": largest_error(own, expected).error,
                        "worst": largest_error(own, expected).name,
                        "missing": sorted(own.keys() ^ expected.keys()),
                        "failed": result.tenants[number].failed,
                    }
                )
        alone[0].plain.close()
        moved = [n for n, weight in host.weights().items() if not torch.equal(weight, before[n])]
        rows.append({"moved": moved})
    return rows


def three_steps(world: Any, *, plans: list[str | int], **changes: Any) -> dict[str, Any]:
    """How far adapters and moments are from a textbook's after three steps; tenant 1 has no data in the second."""
    with company(world, **changes) as (host, starts):
        before, alone = host.weights(), each_alone(host, starts)
        kept, worst, norms = True, 0.0, 0.0
        for number, which in enumerate(plans):
            tenants = (0, 2) * 4 if number == 1 else TENANTS
            plan, data = plan_of(host, which, tenants=tenants), tokens(LENGTHS, seed=number)
            resting = host.adapters.state(1)
            result = host.train_step(plan, data, lr={tenant: RATES[tenant] for tenant in set(tenants)})
            for tenant in sorted(set(tenants)):
                batch = own_batch(plan, tenant, data, None)
                loss, gradients = alone[tenant].gradients(*batch)
                norm = alone[tenant].step(gradients, RATES[tenant])
                worst = max(worst, abs(result.tenants[tenant].loss - loss) / loss)
                norms = max(norms, abs(result.tenants[tenant].grad_norm - norm) / norm)
            if number == 1:
                kept = all(_equal(a, b) for a, b in zip(resting[:3], host.adapters.state(1)[:3], strict=True))
        errors = {"weights": 0.0, "first": 0.0, "second": 0.0}
        for tenant, one in enumerate(alone):
            state = host.adapters.state(tenant)
            for name, (weight, first, second) in one.optimizer.states.items():
                errors["first"] = max(errors["first"], relative_error(state.first[name], first))
                errors["second"] = max(errors["second"], relative_error(state.second[name], second))
                start = starts[tenant].weights[name]
                errors["weights"] = max(errors["weights"], relative_error(state.weights[name] - start, weight - start))
        alone[0].plain.close()
        moved = [n for n, weight in host.weights().items() if not torch.equal(weight, before[n])]
        steps = [host.adapters.state(tenant).steps for tenant in range(len(alone))]
        return {**errors, "loss": worst, "norm": norms, "kept": kept, "moved": moved, "steps": steps}


def _equal(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def on_one_stage(world: Any, **changes: Any) -> dict[str, Any]:
    """Two steps of a tenant that adapts one layer alone, so that other stages have nothing of it."""
    adapter, losses, norms = Adapter(r=3, target_modules=("layers.0.self_attn.q_proj",)), [], []
    with hosted(world, plugins__lora={"enabled": True}, **changes) as host:
        host.adapters.join(9, adapter, TRAINS[0])
        for seed in (0, 1):
            plan = plan_of(host, seed, tenants=(9,) * len(LENGTHS))
            result = host.train_step(plan, tokens(LENGTHS, seed), lr={9: 1e-2})
            losses.append(result.tenants[9].loss)
            norms.append(result.tenants[9].grad_norm)
        state = host.adapters.state(9)
        weights = {name: weight.numpy() for name, weight in state.weights.items()}
    return {"losses": losses, "norms": norms, "weights": weights}
