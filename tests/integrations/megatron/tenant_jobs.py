"""What the ranks of test_tenants.py do: three tenants in company against each trained alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from evenload.core.laws import check
from evenload.core.plan.step_plan import Op, StepPlan
from evenload.core.recipe.adapter import Adapter
from evenload.runtime.adapters.places import AdapterState
from harness.proof import LENGTHS, Found, planned, tokens
from harness.proof.tenants import (
    TENANTS,
    TRAINS,
    adapters_of,
    each_alone,
    errors_in_company,
    joined,
    steps_in_company,
    with_tenants,
)
from megatron_tests.jobs import hosted


@contextmanager
def company(world: Any, *, dropout: float = 0.0, **changes: Any) -> Iterator[tuple[Any, list[AdapterState]]]:
    """A host on which the three tenants train, and what they start from."""
    with hosted(world, plugins__lora={"enabled": True}, **changes) as host:
        yield host, joined(host, dropout)


def join_anew(host: Any, starts: list[AdapterState], dropout: float = 0.0) -> None:
    """The tenants leave, and begin again."""
    for number, adapter in enumerate(adapters_of(host.recipe.model.family, dropout)):
        host.adapters.leave(number)
        host.adapters.join(number, adapter, TRAINS[number], starts[number])


def plan_of(
    host: Any, which: str | int, lengths: Any = LENGTHS, tenants: Any = TENANTS, *, splits: bool = False, **drawn: Any
) -> StepPlan:
    """A plan of tenants. ``splits``: the weight gradients of every second pass are a pass of their own, behind all
    others."""
    plan = planned(host, which, lengths, **drawn)
    if splits:
        last = [[Op("W", op.micro_batch) for op in row if op.kind == "B"][::2] for row in plan.order]
        order = tuple((*row, *later) for row, later in zip(plan.order, last, strict=True))
        plan = check(plan.revised(order=order, limits=replace(plan.limits, splits_backward=True)))
    return with_tenants(plan, tenants)


def in_company(
    world: Any,
    *,
    plans: list[str | int],
    drawn: dict[str, Any] | None = None,
    tenants: Any = TENANTS,
    drawings: int = 0,
    **changes: Any,
) -> tuple[list[Found], list[str]]:
    """Errors of loss and gradients of each tenant under each plan, and which weights of the base have moved."""
    with company(world, **changes) as (host, starts):
        before, alone = host.weights(), each_alone(host, starts)
        named = [(which, plan_of(host, which, tenants=tenants, **(drawn or {}))) for which in plans]
        rows = errors_in_company(host, alone, named, drawings=drawings)
        alone[0].plain.close()
        return rows, _moved(host, before)


def three_steps(world: Any, *, plans: list[str | int], **changes: Any) -> dict[str, Any]:
    """How far adapters and moments are from a textbook's after three steps; tenant 1 has no data in the second."""
    with company(world, **changes) as (host, starts):
        before, alone = host.weights(), each_alone(host, starts)
        batches = [TENANTS, (0, 2) * 4, TENANTS]
        steps = [plan_of(host, which, tenants=tenants) for which, tenants in zip(plans, batches, strict=True)]
        found = steps_in_company(host, starts, alone, steps)
        alone[0].plain.close()
        return {**found, "moved": _moved(host, before)}


def _moved(host: Any, before: Any) -> list[str]:
    return [name for name, weight in host.weights().items() if not torch.equal(weight, before[name])]


def on_one_stage(world: Any, **changes: Any) -> dict[str, Any]:
    """Two steps of a tenant that adapts one layer alone, so that other stages have nothing of it."""
    adapter, losses, norms = Adapter(r=3, target_modules=("layers.0.self_attn.q_proj",)), [], []
    with hosted(world, plugins__lora={"enabled": True}, **changes) as host:
        host.adapters.join(9, adapter, TRAINS[0])
        for seed, which in enumerate(("packs", 5)):
            plan = plan_of(host, which, tenants=(9,) * len(LENGTHS))
            result = host.train_step(plan, tokens(seed=seed), lr={9: 1e-2})
            losses.append(result.tenants[9].loss)
            norms.append(result.tenants[9].grad_norm)
        state = host.adapters.state(9)
        weights = {name: weight.numpy() for name, weight in state.weights.items()}
    return {"losses": losses, "norms": norms, "weights": weights}
