"""What ranks do with tenants under DeepSpeed: each as if alone with the base, beside one that misbehaves, and what ZeRO
3 keeps of a base that is frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed_tests.jobs import gathered, hosted
from evenload.integrations.deepspeed.engine.engine import Releases
from evenload.integrations.reference.exactness import relative_error
from evenload.runtime.adapters.places import AdapterState
from harness.proof import planned, tokens
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
from torch.nn.functional import cross_entropy

RATES = {0: 5e-4, 1: 2e-4, 2: 1e-4}
"""Of each tenant: so small that AdamW does not make a number of a rounding error."""
BAD = 1
"""The tenant that misbehaves."""


@contextmanager
def company(**asked: Any) -> Iterator[tuple[Any, list[AdapterState]]]:
    """A host with three tenants, and what they start from: as small as the base, or float32 would round more."""
    with hosted(lora=True, **asked) as host:
        yield host, joined(host, size=0.03)


def exactness(names: list[str], drawings: int = 0, tenants: Any = TENANTS, **asked: Any) -> dict[str, Any]:
    with company(**asked) as (host, starts):
        before = host.weights()
        plans = [(name, with_tenants(planned(host, name), tenants)) for name in names]
        found = errors_in_company(host, each_alone(host, starts, "fp64"), plans, drawings=drawings)
        moved = [name for name, weight in host.weights().items() if not torch.equal(weight, before[name])]
        return {"found": found, "moved": moved, "gathered": gathered(host) if host.layout.pp == 1 else 0}


def three_steps(names: list[str], **asked: Any) -> dict[str, Any]:
    """A step of each plan, the second without tenant 1: errors against each tenant alone, and what must not move."""
    with company(**asked) as (host, starts):
        before, alone = host.weights(), each_alone(host, starts, "fp64")
        absent = [(0, 2) * 4 if number == 1 else (0, 1, 2, 0, 1, 2, 2, 0) for number in range(len(names))]
        plans = [with_tenants(planned(host, name), own) for name, own in zip(names, absent, strict=True)]
        said = steps_in_company(host, starts, alone, plans, RATES)
        said["moved"] = [name for name, weight in host.weights().items() if not torch.equal(weight, before[name])]
        return said | _scored(host, plans[0], alone)


@torch.no_grad()
def _scored(host: Any, plan: Any, alone: Any) -> dict[str, float]:
    data = tokens()
    scores, logits = host.score(plan, data), host.logits(plan, data)
    errors = {"score": 0.0, "logits": 0.0}
    for tenant in range(len(alone)):
        alone[tenant].merged()
        for i in (i for i, own in enumerate(plan.tenants.tolist()) if own == tenant):
            wanted = alone[tenant].plain.logits(data(i).tolist())
            if logits:
                errors["logits"] = max(errors["logits"], relative_error(logits[i], wanted))
            loss = float(cross_entropy(wanted[:-1], torch.as_tensor(data(i))[1:].long(), reduction="sum"))
            errors["score"] = max(errors["score"], abs(scores.losses[i] - loss) / max(loss, 1.0))
    return errors


def beside(names: list[str], **asked: Any) -> dict[str, Any]:
    """Adapters and losses of the others after a step of each plan beside a tenant that behaves, one whose weights are
    not numbers and one whose rate is not finite; and what came of it."""
    with company(**asked) as (host, starts):
        return {how: _beside(host, starts, how, names) for how in ("", "weights", "rate")}


def _beside(host: Any, starts: list[AdapterState], how: str, names: list[str]) -> dict[str, Any]:
    adapters = adapters_of(host.recipe.model.family)
    for number, start in enumerate(starts):
        if how == "weights" and number == BAD:
            start = AdapterState({n: torch.full_like(m, torch.nan) for n, m in start.weights.items()}, {}, {}, 0)
        host.adapters.leave(number)
        host.adapters.join(number, adapters[number], TRAINS[number], start)
    rates = {**RATES, **({BAD: torch.inf} if how == "rate" else {})}
    results = [host.train_step(with_tenants(planned(host, name)), tokens(), lr=rates) for name in names]
    states = [host.adapters.state(number) for number in (0, 2)]
    return {
        "failed": [{tenant: one.failed for tenant, one in r.tenants.items() if one.failed} for r in results],
        "losses": [{tenant: one.loss for tenant, one in r.tenants.items() if tenant != BAD} for r in results],
        "bits": [{n: t.numpy().tobytes() for n, t in part.items()} for state in states for part in state[:3]],
        "steps": host.adapters.state(BAD).steps,
    }


def gathered_while_backward_ends(
    tenants: bool, recompute: bool = False, ways: tuple[bool, ...] = (True, False)
) -> list[list[int]]:
    """Parameters that ZeRO 3 has gathered when the backward of the first layer ends, for each backward of a step.

    ``ways``: with the counters by which DeepSpeed releases parameters, or with these as the last forward left them.
    """
    rows = []
    with hosted(3, lora=tenants, recompute=recompute) as host:
        plan = planned(host, "slices, in step")
        if tenants:
            joined(host, size=0.03)
            plan = with_tenants(plan)
        layer = host.engine.module.model.layers[0].input_layernorm
        for counted in ways:
            seen: list[int] = []
            note = lambda *_, seen=seen: seen.append(gathered(host))  # noqa: E731
            handle = layer.register_full_backward_hook(note) if tenants else layer.weight.register_hook(note)
            with patch.object(Releases, "after_forward", Releases.after_forward if counted else lambda _: None):
                host.gradients(plan, tokens())
            handle.remove()
            rows.append(seen)
    return rows
