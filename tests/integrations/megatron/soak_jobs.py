"""What the ranks of test_tenants.py do for long: tenants join, rest, leave and fail at random, and are compared later
with the same tenants, one after the other, each alone."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from evenload.core.plan.step_plan import as_lengths
from evenload.core.recipe.adapter import Adapter, TenantTrain
from evenload.runtime.adapters.tenant import TenantAdapter
from harness.proof import VOCABULARY, planned
from megatron_tests.jobs import hosted

MOST = 3
"""Tenants at once."""
RATE = 1e-3
"""Ten times this, some trainings diverge, and the last digit of a sum is the first of a loss 100 steps later."""


@dataclass
class Life:
    """What a tenant has been through."""

    adapter: Adapter
    train: TenantTrain
    batches: list[list[np.ndarray]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    failed: str = ""


def soak(world: Any, *, seed: int, steps: int, **changes: Any) -> dict[str, Any]:
    """So many steps; what was left behind, and how far each tenant's series is from that of the same tenant alone."""
    draws = np.random.default_rng(seed)
    lives: list[Life] = []
    here: set[int] = set()
    with hosted(world, plugins__lora={"enabled": True}, **changes) as host:
        before = things_left(host)
        for step in range(steps):
            _come_and_go(host, draws, lives, here)
            poisoned = _poison(host, draws, here) if draws.random() < 0.05 else None
            batches = {n: _batch(draws) for n in sorted(here) if n == poisoned or draws.random() < 0.4}
            if not batches:
                continue
            for number, failed in _step(host, step, batches, lives).items():
                assert bool(failed) == (number == poisoned), f"step {step}: tenant {number}: {failed or 'went on'}"
                if failed:
                    lives[number].failed = failed
                    _leave(host, lives, here, number)
        for number in sorted(here):
            _leave(host, lives, here, number)
        after = things_left(host)
        errors = [error for life in lives for error in _alone(host, life)]
    return {
        "tenants": len(lives),
        "failed": sum(bool(life.failed) for life in lives),
        "steps": sum(len(life.losses) for life in lives),
        "before": before,
        "after": after,
        "closed": len(host.adapters.numbers),
        "worst": max(errors),
    }


def things_left(host: Any) -> dict[str, int]:
    """Hooks on the model, process groups, and adapters in memory."""
    gc.collect()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in host.model.modules())
    adapters = sum(isinstance(thing, TenantAdapter) for thing in gc.get_objects())
    return {"hooks": hooks, "groups": len(dist.distributed_c10d._world.pg_map), "adapters": adapters}


def _come_and_go(host: Any, draws: Any, lives: list[Life], here: set[int]) -> None:
    if len(here) < MOST and (not here or draws.random() < 0.2):
        adapter = Adapter(r=int(draws.integers(1, 9)), lora_alpha=8)
        train = TenantTrain(weight_decay=float(draws.random()), clip_grad=float(draws.choice([0.0, 0.1, 1.0])))
        lives.append(Life(adapter, train))
        here.add(len(lives) - 1)
        host.adapters.join(len(lives) - 1, adapter, train)
    elif len(here) > 1 and draws.random() < 0.12:
        _leave(host, lives, here, int(draws.choice(sorted(here))))


def _leave(host: Any, lives: list[Life], here: set[int], number: int) -> None:
    lives[number].weights = {name: w.clone() for name, w in host.adapters.state(number).weights.items()}
    host.adapters.leave(number)
    here.discard(number)


def _poison(host: Any, draws: Any, here: set[int]) -> int | None:
    if len(here) < 2:
        return None
    number = int(draws.choice(sorted(here)))
    host.adapters._tenants[number].values.fill_(float("nan"))
    return number


def _batch(draws: Any) -> list[np.ndarray]:
    return [draws.integers(0, VOCABULARY, draws.integers(2, 24)) for _ in range(draws.integers(1, 3))]


def _step(host: Any, step: int, batches: dict[int, list[np.ndarray]], lives: list[Life]) -> dict[int, str]:
    """Train the batches of several tenants together; why each failed."""
    samples = [sample for batch in batches.values() for sample in batch]
    tenants = [number for number, batch in batches.items() for _ in batch]
    plan = planned(host, step, [len(sample) for sample in samples]).revised(tenants=as_lengths(tenants))
    result = host.train_step(plan, samples.__getitem__, lr=dict.fromkeys(batches, RATE))
    for number, of_tenant in result.tenants.items():
        if not of_tenant.failed:
            lives[number].batches.append(batches[number])
            lives[number].losses.append(of_tenant.loss)
    return {number: of_tenant.failed for number, of_tenant in result.tenants.items()}


def _alone(host: Any, life: Life) -> list[float]:
    """Relative differences of losses, and of the adapter at the end, where it did not fail."""
    host.adapters.join(0, life.adapter, life.train)
    alone = Life(life.adapter, life.train)
    for step, batch in enumerate(life.batches):
        _step(host, step, {0: batch}, [alone])
    state = host.adapters.state(0).weights
    host.adapters.leave(0)
    errors = [abs(a - b) / b for a, b in zip(life.losses, alone.losses, strict=True)]
    if not life.failed:
        errors += [float((life.weights[n] - w).norm() / max(1e-30, float(w.norm()))) for n, w in state.items()]
    return errors
