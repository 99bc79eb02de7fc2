"""What the ranks of test_isolation.py do: a tenant that misbehaves beside two that do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from evenload.runtime.adapters.places import AdapterState
from evenload.runtime.attention.labels import Labels, TargetWeights
from harness.proof import LENGTHS, tokens
from harness.proof.tenants import RATES, TRAINS, adapters_of
from megatron_tests.jobs import masked
from megatron_tests.tenant_jobs import company, join_anew, plan_of

BAD = 1
"""Number of the tenant that misbehaves."""


def beside(world: Any, *, faults: list[str], plans: list[str | int], **changes: Any) -> list[dict[str, Any]]:
    """Adapters, losses and what came of each tenant after some steps: where nobody misbehaves, and where one does."""
    with company(world, **changes) as (host, starts):
        return [_steps(host, starts, fault, plans) for fault in ("", *faults)]


def _steps(host: Any, starts: list[AdapterState], fault: str, plans: list[str | int]) -> dict[str, Any]:
    join_anew(host, starts)
    if fault == "weights":
        host.adapters.leave(BAD)
        broken = {name: torch.full_like(weight, torch.nan) for name, weight in starts[BAD].weights.items()}
        host.adapters.join(BAD, adapters_of("llama")[BAD], TRAINS[BAD], AdapterState(broken, {}, {}, 0))
    rates = {"rate": torch.inf, "huge rate": 1e200}.get(fault, RATES[BAD])
    rows = []
    for number, which in enumerate(plans):
        plan, labels = plan_of(host, which), masked(LENGTHS)
        if fault == "data" and number == 1:
            labels = _other_targets(labels, plan.tenants)
        if fault == "cancelling weights" and number == 1:
            labels = _cancelling(labels, plan.tenants)
        before = host.adapters.state(BAD)
        with _activations(host, plan) if fault == "activations" and number == 1 else nullcontext():
            result = host.train_step(plan, tokens(LENGTHS, number), lr={**RATES, BAD: rates}, labels=labels)
        after = host.adapters.state(BAD)
        rows.append(
            {
                "failed": {tenant: one.failed for tenant, one in result.tenants.items() if one.failed},
                "losses": {tenant: one.loss for tenant, one in result.tenants.items() if tenant != BAD},
                "loss": result.loss,
                "norm": result.grad_norm,
                "frozen": after.steps == before.steps and _bits(after.weights) == _bits(before.weights),
            }
        )
    states = {tenant: host.adapters.state(tenant) for tenant in range(len(starts)) if tenant != BAD}
    return {"rows": rows, "states": {tenant: [*map(_bits, state[:3])] for tenant, state in states.items()}}


def _bits(tensors: Any) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def _other_targets(labels: Labels, tenants: Any) -> Labels:
    """The first sequence of the tenant has one target less than was counted."""
    place = int(np.flatnonzero(tenants == BAD)[0])

    def of(index: int) -> Any:
        own = labels.of(index).copy()
        if index == place:
            own[1 + np.flatnonzero(own[1:] >= 0)[0]] = -100
        return own

    return Labels(of, labels.targets)


def _cancelling(labels: Labels, tenants: Any) -> Labels:
    """The weights of the tenant's targets add up to 0, those of the others are 1."""
    bad = np.flatnonzero(tenants == BAD)
    factors, sums = np.ones(len(tenants)), labels.targets.astype(np.float64)
    factors[bad] = np.arange(len(bad)) + 0.5
    sums[bad] = 0.0
    return labels._replace(weights=TargetWeights(lambda index: np.full(LENGTHS[index], factors[index]), sums))


@contextmanager
def _activations(host: Any, plan: Any) -> Iterator[None]:
    """What enters the first layer of this stage is not a number for the tokens of the tenant."""

    def spoil(_: Any, arguments: Any, words: Any) -> Any:
        ids_T = words["packed_seq_params"].pack.sequence_ids_T
        own_T = torch.isin(ids_T, torch.from_numpy(np.flatnonzero(plan.tenants == BAD)))
        hidden = words["hidden_states"] if "hidden_states" in words else arguments[0]
        spoiled = torch.where(own_T[:, None, None], torch.nan, hidden)
        if "hidden_states" in words:
            return arguments, {**words, "hidden_states": spoiled}
        return (spoiled, *arguments[1:]), words

    hook = host.model.decoder.layers[0].register_forward_pre_hook(spoil, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
