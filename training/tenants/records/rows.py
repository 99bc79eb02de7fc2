"""What is recorded of the steps of a job of tenants, and shown while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ....core.planning.planner import Planned
from ...drawing import num_waiting
from ...metrics import Taken
from ...progress import Progress
from ...run.writers import Entry
from ..state.drawing import own_draws
from ..state.tenant import ENDED, ActiveTenant


@dataclass(frozen=True)
class JobRow:
    """Measures of one step of the job; seconds are wall time on the slowest rank."""

    step: int
    num_tenants: int
    """That took part."""
    sequences: int
    tokens: int
    targets: int
    step_s: float
    plan_s: float
    plan_wait_s: float
    imbalance: float
    """Busiest data-parallel rank over mean, measured."""
    padding_frac: float
    bound_s: float
    bubble_frac: float
    """Idle share of the step, mean over stages and plane ranks."""


def row_of(step: int, planned: Planned, taken: Taken) -> JobRow:
    plan, busy, idle = planned.plan, taken.busy_s.sum(axis=0), 1 - taken.busy_s / taken.step_s
    return JobRow(
        step=step,
        num_tenants=len(own_draws(planned.draw)),
        sequences=len(plan.lengths),
        tokens=plan.num_tokens,
        targets=taken.result.num_targets,
        step_s=taken.step_s,
        plan_s=taken.plan_s,
        plan_wait_s=taken.wait_s,
        imbalance=float(busy.max() / busy.mean()) if busy.any() else 1.0,
        padding_frac=plan.padding_frac,
        bound_s=plan.bound_s,
        bubble_frac=float(idle.mean()),
    )


def tenant_row(tenant: ActiveTenant, planned: Planned, taken: Taken, rate: float) -> dict[str, Any]:
    """What metrics.jsonl has of one tenant's step, by its own count from 0."""
    draw, result = own_draws(planned.draw)[tenant.number], taken.result.tenants[tenant.number]
    return {
        "step": tenant.step - (not result.failed),
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": rate,
        "tokens": int(draw.lengths.sum()),
        "targets": result.num_targets,
        "step_s": taken.step_s,
        "samples": draw.samples.tolist(),
        "waiting": num_waiting(draw.state),
        "without_target": draw.without_target,
        **({"failed": result.failed} if result.failed else {}),
    }


def entry_of_step(row: JobRow, own: Mapping[str, Mapping[str, Any]]) -> Entry:
    """What logs get of a step; ``own``: of each tenant, by name."""
    scalars = {f"evenload/{key}": value for key, value in asdict(row).items() if key != "step"}
    for name, numbers in own.items():
        shown = {key: value for key, value in numbers.items() if isinstance(value, (int, float)) and key != "step"}
        scalars |= {f"evenload/tenants/{name}/{key}": value for key, value in shown.items()}
    return Entry(row.step, scalars, {**asdict(row), "tenants": {name: dict(numbers) for name, numbers in own.items()}})


def totals(rows: Sequence[JobRow]) -> dict[str, Any]:
    """Sums over all steps; rates over those after the first, which pays for warming up."""
    timed = rows[1:] or rows
    seconds = sum(row.step_s for row in timed)
    return {
        "steps": len(rows),
        "tokens": sum(row.tokens for row in rows),
        "targets": sum(row.targets for row in rows),
        "train_s": sum(row.step_s for row in rows),
        "tokens_per_s": sum(row.tokens for row in timed) / seconds if timed else 0.0,
        "plan_share": sum(row.plan_wait_s for row in timed) / seconds if timed else 0.0,
        "imbalance": sum(row.imbalance for row in timed) / len(timed) if timed else 1.0,
        "bubble_frac": sum(row.bubble_frac * row.step_s for row in timed) / seconds if timed else 0.0,
    }


class Live:
    """The progress that is shown of each tenant."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._began: dict[int, int] = {}
        """Steps before those of this run, of tenants that have not ended, by their numbers."""

    def tick(self, tenant: ActiveTenant) -> None:
        """A step of a tenant is done."""
        began = self._began.setdefault(tenant.number, tenant.step - 1)
        self._progress(tenant.name, tenant.step - began, tenant.steps - began, _said(tenant))

    def end(self, tenants: Iterable[ActiveTenant]) -> None:
        """Say of those that have ended how they did."""
        for tenant in tenants:
            if tenant.state in ENDED and tenant.number in self._began:
                began, text = self._began.pop(tenant.number), f"{tenant.state}  {_said(tenant)}"
                self._progress(tenant.name, tenant.step - began, tenant.steps - began, text)


def _said(tenant: ActiveTenant) -> str:
    if not tenant.losses:
        return ""
    best = f"  best {tenant.best:.4f}" if tenant.best is not None else ""
    return f"loss {tenant.losses[-1]:.4f}{best}  {tenant.tokens / tenant.seconds:,.0f} tokens/s"
