"""What the ranks of test_isolation.py do: a tenant that misbehaves beside two that do not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from evenload.runtime.adapters.places import AdapterState

_spec = importlib.util.spec_from_file_location("rank_tenants", Path(__file__).with_name("rank_tenants.py"))
tenants = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tenants)
BAD = 1


def beside(how: str, stage: int, names: list[str], **more: Any) -> dict[str, Any]:
    """Adapters and losses of the others after a step of each plan, and what came of the tenant; "": it behaves."""
    with tenants.hosted(stage, **more) as (host, alone):
        if how == "weights":
            broken = {name: torch.full_like(m, torch.nan) for name, m in host.adapters.state(BAD).weights.items()}
            host.adapters.leave(BAD)
            host.adapters.join(BAD, alone[BAD].adapter, tenants.alone.TRAIN, AdapterState(broken, {}, {}, 0))
        rates = {**tenants.alone.RATES, **({BAD: torch.inf} if how == "rate" else {})}
        failed, losses = [], []
        for number, name in enumerate(names):
            plan, tokens_of, labels = tenants.case(host, name, number)
            own = {tenant: rates[tenant] for tenant in sorted(set(plan.tenants.tolist()))}
            result = host.train_step(plan, tokens_of, lr=own, labels=labels)
            failed.append({tenant: one.failed for tenant, one in result.tenants.items() if one.failed})
            losses.append({tenant: one.loss for tenant, one in result.tenants.items() if tenant != BAD})
        states = [host.adapters.state(number) for number in (0, 2)]
        bits = [{n: t.numpy().tobytes() for n, t in part.items()} for state in states for part in state[:3]]
        return {"failed": failed, "losses": losses, "bits": bits, "steps": host.adapters.state(BAD).steps}
