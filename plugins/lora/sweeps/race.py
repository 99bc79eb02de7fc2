"""A sweep while its job runs: its trials, which are tenants, and the race between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..state.status import TenantStatus, status_of
from ..state.tenant import ActiveTenant
from .halving import Halving
from .ranking import ranking_of
from .trials import Sweep


class Race:
    """See the module. ``state``: what `state` gave before a job was resumed; ``steps`` of each trial; ``digest``: of
    the sweep's file."""

    def __init__(self, sweep: Sweep, digest: str, steps: int, state: Mapping[str, Any] | None = None) -> None:
        self.sweep, self._digest = sweep, digest
        self.halving = Halving([trial.name for trial in sweep.trials], sweep.halve_every, steps, state)
        self._names = {trial.name for trial in sweep.trials}

    def trials(self, tenants: Iterable[ActiveTenant]) -> list[ActiveTenant]:
        """The tenants that are trials of the sweep, in the order in which they came; of a name the last one."""
        return list({tenant.name: tenant for tenant in tenants if tenant.name in self._names}.values())

    def next_rung(self, tenant: ActiveTenant) -> int:
        """Steps after which a trial waits for a verdict, which it may have come to; all of its steps where none is
        left."""
        every = self.sweep.halve_every or tenant.steps
        rungs = range(-(-max(1, tenant.step) // every) * every, tenant.steps, every)
        return next((step for step in rungs if self.halving.waits(tenant.name, step)), tenant.steps)

    def take_down(self, trials: Iterable[ActiveTenant]) -> bool:
        """Take down how far trials have come, and which of them have ended; whether that is news."""
        before = repr(self.halving.state())
        for tenant in trials:
            loss, ended = self.loss_of(tenant), tenant.state in ("done", "stopped")
            if tenant.state in ("failed", "left") or (ended and loss is None):
                self.halving.fail(tenant.name)
            elif ended and loss is not None:
                self.halving.end(tenant.name, loss)
            elif loss is not None and self.halving.waits(tenant.name, tenant.step):
                self.halving.arrive(tenant.name, tenant.step, loss)
        return repr(self.halving.state()) != before

    def loss_of(self, tenant: ActiveTenant) -> float | None:
        """By which a trial is ranked: the lowest of its evaluations; without any, the mean loss since the last rung."""
        if tenant.config.evaluate is not None:
            return tenant.best
        every = self.sweep.halve_every or tenant.steps
        count = tenant.step % every or min(every, tenant.step)
        losses = tenant.losses[-count:] if count else []
        return math.fsum(losses) / len(losses) if losses else None

    def ranking(self, trials: Iterable[ActiveTenant], past: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """How the trials rank; ``past``: what ``status.json`` says of those that ended in an earlier job."""
        here = {tenant.name: tenant for tenant in trials}
        losses: dict[str, float] = {}
        standing = {trial.name: TenantStatus(trial.name, "waiting", 0, 0) for trial in self.sweep.trials}
        standing |= {name: status_of(row) for name, row in past.items() if name in standing}
        standing |= {name: status_of(tenant.status()) for name, tenant in here.items()}
        for name, status in standing.items():
            loss = self.loss_of(here[name]) if name in here else self.halving.loss(name)
            if loss is not None and status.state not in ("failed", "left"):
                losses[name] = loss
        ranking = ranking_of(self.sweep, self.halving, losses, standing)
        return {**ranking, "file": self._digest, "race": self.halving.state()}
