"""A sweep while its job runs: its trials, which are tenants, and the race between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..status import Status, status_of
from ..tenant import ActiveTenant
from .halving import Halving, Verdict
from .ranking import ranking_of
from .trials import Sweep, refuse_late_rung


class Race:
    """See the module. ``state``: what `state` gave before a job was resumed; ``steps`` of each trial.

    Raises EvenloadError where no rung comes before the last step.
    """

    def __init__(self, sweep: Sweep, steps: int, state: Mapping[str, Any] | None = None) -> None:
        refuse_late_rung(sweep.name, sweep.halve_every, steps)
        self.sweep = sweep
        self._halving = Halving([trial.name for trial in sweep.trials], sweep.halve_every, steps, state)
        self._names = {trial.name for trial in sweep.trials}
        self._shown: Any = None

    def trials(self, tenants: Iterable[ActiveTenant]) -> list[ActiveTenant]:
        """Those of the tenants that are its trials."""
        return [tenant for tenant in tenants if tenant.name in self._names]

    def next_rung(self, tenant: ActiveTenant) -> int:
        """Steps behind which a trial must wait for a verdict: those of the next rung that is open to it, or all."""
        later = range(tenant.step + (not self._halving.waits(tenant.name, tenant.step)), tenant.steps)
        return next((step for step in later if self._halving.waits(tenant.name, step)), tenant.steps)

    def take_down(self, trials: Iterable[ActiveTenant]) -> None:
        """Take down how far trials have come, and which of them have ended."""
        for tenant in trials:
            loss = self.loss_of(tenant)
            if tenant.state in ("failed", "left") or (tenant.state in ("done", "stopped") and loss is None):
                self._halving.fail(tenant.name)
            elif tenant.state in ("done", "stopped") and loss is not None:
                self._halving.end(tenant.name, loss)
            elif loss is not None and self._halving.waits(tenant.name, tenant.step):
                self._halving.arrive(tenant.name, tenant.step, loss)

    def close(self) -> Verdict | None:
        """The verdict of the next rung, if every trial in the race has come to it."""
        return self._halving.close()

    @property
    def over(self) -> bool:
        return self._halving.over

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
        standing = {trial.name: Status(trial.name, "waiting", 0, 0) for trial in self.sweep.trials}
        standing |= {name: status_of(row) for name, row in past.items() if name in standing}
        standing |= {name: status_of(tenant.status()) for name, tenant in here.items()}
        for name, status in standing.items():
            loss = self.loss_of(here[name]) if name in here else self._halving.loss(name)
            if loss is not None and status.state not in ("failed", "left"):
                losses[name] = loss
        return ranking_of(self.sweep, self._halving, losses, standing)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, ready for JSON."""
        return self._halving.state()
