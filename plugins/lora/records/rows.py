"""What is recorded of the steps of a job of tenants, and shown while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ....core.planning.chain import PlanChain
from ....core.planning.planner import Draw, Planned
from ....data.mixed import MixedSource
from ....data.sources import Source
from ....integrations.host.trained import TenantResult
from ....training.drawing import num_waiting
from ....training.metrics import MeasuredStep, StepMeasures, domain_losses, rates_of, sums_of
from ....training.progress import Progress
from ....training.replicas import ReplicaRow
from ....training.run.writers import Entry
from ..state.drawing import own_draws
from ..state.tenant import ENDED, ActiveTenant


@dataclass(frozen=True, kw_only=True)
class JobRow(StepMeasures):
    """What is recorded of a step of the job."""

    num_tenants: int
    """That took part."""
    sequences: int


def tenant_row(tenant: ActiveTenant, planned: Planned, taken: MeasuredStep, rate: float) -> dict[str, Any]:
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
        **_of_domains(tenant.source, draw, result),
        **({"failed": result.failed} if result.failed else {}),
    }


def _of_domains(source: Source, draw: Draw, result: TenantResult) -> dict[str, Any]:
    """What each domain of a tenant's data came to; nothing where there is one source, or the step has failed."""
    if not isinstance(source, MixedSource) or result.failed:
        return {}
    return {"domains": domain_losses(source.domains, [(draw, result.scores)])}


def entry_of_step(row: JobRow, own: Mapping[str, Mapping[str, Any]]) -> Entry:
    """What logs get of a step; ``own``: of each tenant, by name."""
    numbers_of = {key: value for key, value in asdict(row).items() if key not in ("step", "replicas")}
    scalars = {f"evenload/{key}": value for key, value in numbers_of.items()}
    for name, numbers in own.items():
        shown = {key: value for key, value in numbers.items() if isinstance(value, (int, float)) and key != "step"}
        shown |= {f"domains/{domain}/loss": own["loss"] for domain, own in numbers.get("domains", {}).items()}
        scalars |= {f"evenload/tenants/{name}/{key}": value for key, value in shown.items()}
    scalars |= {f"evenload/replicas/{one.replica}/busy_s": one.busy_s for one in row.replicas}
    return Entry(row.step, scalars, {**asdict(row), "tenants": {name: dict(numbers) for name, numbers in own.items()}})


def totals_of_replicas(rows: Sequence[JobRow], chains: Mapping[int, PlanChain]) -> list[dict[str, Any]]:
    """What each replica came to over all steps, by its number; nothing where there is one."""
    by_number: dict[int, list[ReplicaRow]] = {}
    for one in (one for row in rows for one in row.replicas):
        by_number.setdefault(one.replica, []).append(one)
    total_s = sum(row.step_s for row in rows if row.replicas)
    return [
        {
            "replica": number,
            **{key: getattr(chains[number].context.layout, key) for key in ("tp", "pp", "dp")},
            "cluster": chains[number].context.cluster.name,
            **{key: sum(getattr(row, key) for row in own) for key in ("sequences", "tokens", "busy_s", "predicted_s")},
            "busy_frac": sum(row.busy_s for row in own) / total_s,
        }
        for number, own in sorted(by_number.items())
    ]


def totals(rows: Sequence[JobRow]) -> dict[str, Any]:
    """Sums over all steps; rates over those after the first, which pays for warming up."""
    return {**sums_of(rows), **rates_of(rows)}


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
