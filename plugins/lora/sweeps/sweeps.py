"""Where tenants are evaluated, where they stop, and where sweeps drop trials: between two steps, by all ranks alike.

A tenant whose going on is decided after a step takes part up to it (`ActiveTenant.until`), so no batch of a later step
is drawn before the verdict; batches of everybody else stay planned ahead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ....runtime.world.agreement import from_first
from ....training.metrics import perplexity
from ....training.run.writers import Entry, Write
from ..arrivals.job import TenantJob
from ..members import TenantTable
from ..records.output import BEST, LAST, Output
from ..state.tenant import ENDED, ActiveTenant
from .evaluation import Evaluated, Evaluations, HeldOut, held_out_of, is_due, is_over, next_due
from .race import Race
from .ranking import race_in, write_ranking

logger = logging.getLogger("evenload")


class Sweeps:
    """See the module. ``saved``: what `state` gave before the job was resumed."""

    def __init__(
        self, job: TenantJob, output: Output, members: TenantTable, write: Write, saved: Mapping[str, Any] | None = None
    ) -> None:
        self._job = job
        self._output = output
        self._members = members
        self._write = write
        self._saved = saved
        self._evaluations = Evaluations(job)
        self._held_out: dict[int, HeldOut] = {}
        self._races: dict[str, Race] = {}
        """Of sweeps by name."""
        self.rankings: dict[str, dict[str, Any]] = {}
        """Of sweeps by name, as they were written last."""

    def begin(self, step: int) -> None:
        """Evaluate those who take part and have not begun, and say until when all take part. Collective."""
        new = [one for one in self._members.active if one.step == 0 and one.config.evaluate and one.best is None]
        self._evaluate(new, step)
        self.race()

    def after(self, trained: Iterable[ActiveTenant], step: int) -> None:
        """Evaluate those who were trained in a step and are due, and end those who stop there. Collective."""
        due = [one for one in trained if one.config.evaluate and is_due(one.config.evaluate, one.step, one.steps)]
        self._evaluate(due, step)
        for tenant in due:
            evaluate = tenant.config.evaluate
            assert evaluate is not None
            going = tenant.state not in ENDED and tenant.step < tenant.steps
            if going and is_over(evaluate, tenant.step, tenant.best_step, tenant.steps):
                reason = f"no evaluation since step {tenant.best_step} had a lower loss than {tenant.best:.4f}"
                self._members.end(tenant, "stopped", reason)

    def race(self) -> bool:
        """Close the rungs that can be closed, write rankings, and say until when all take part; whether it was decided
        of anybody that he goes on, or ends. Collective."""
        decided = False
        for name in self._members.sweeps:
            self._meet(name)
        for name, race in self._races.items():
            trials = race.trials(self._members.tenants)
            changed = race.take_down(trials)
            while race.halving.close():
                changed = True
                race.take_down(trials)
            for tenant in trials:
                if tenant.state not in ENDED and (rung := race.halving.out_at(tenant.name)):
                    decided = True
                    self._members.end(tenant, "dropped", f"in the worse half of the sweep {name} at rung {rung}")
            if changed:
                self._rank(name, race, trials)
        return self._set_until() or decided

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, ready for JSON."""
        return {name: race.halving.state() for name, race in self._races.items()}

    def _evaluate(self, due: list[ActiveTenant], step: int) -> None:
        """Score tenants, keep adapters of lowest loss, and end those that have no loss, or none that is finite.
        Collective."""
        if not due:
            return
        results, faults = self._evaluations.run([self._held_out_of(tenant) for tenant in due], step)
        for tenant in due:
            if tenant.number in faults:
                self._members.end(tenant, "failed", faults[tenant.number])
            else:
                self._note(tenant, results[tenant.number], step)
        here = {tenant.number for tenant in self._members.here}
        self._held_out = {number: one for number, one in self._held_out.items() if number in here}

    def _note(self, tenant: ActiveTenant, result: Evaluated, step: int) -> None:
        """Take down an evaluation, and keep the adapter if its loss is the lowest. Collective."""
        best = math.isfinite(result.loss) and (tenant.best is None or result.loss < tenant.best)
        row = {"step": tenant.step, "evaluation": _numbers(result, best=best)}
        self._output.row(tenant, row)
        self._write(_entry(step, tenant.name, row))
        if not math.isfinite(result.loss):
            reason = f"the loss of its evaluation is {result.loss} after {tenant.step} steps"
            self._members.end(tenant, "failed", reason)
        elif best:
            tenant.best, tenant.best_step = result.loss, tenant.step
            self._members.keep(tenant, BEST)
        self._output.status(tenant)

    def _held_out_of(self, tenant: ActiveTenant) -> HeldOut:
        if tenant.number not in self._held_out:
            assert tenant.held_out is not None
            assert tenant.config.evaluate is not None
            train = tenant.config.train
            self._held_out[tenant.number] = held_out_of(
                tenant.number, tenant.held_out, tenant.config.evaluate, train.batch_size, train.seed
            )
        return self._held_out[tenant.number]

    def _meet(self, name: str) -> None:
        """Open the race of a sweep that has come. Collective."""
        sweep, digest = self._members.sweeps[name]
        if name in self._races and self._races[name].sweep is sweep:
            return
        trials = [tenant for tenant in self._members.tenants if tenant.file == name and tenant.state not in ENDED]
        state = (self._saved or {}).get(name)
        if name in self._members.replaced:
            state = None
        elif state is None and any(trial.name in self._members.ended for trial in sweep.trials):
            state = from_first(lambda: race_in(self._job.out, name, digest), "job")
        steps = trials[0].steps if trials else sweep.trials[0].tenant.train.steps
        self._races[name] = Race(sweep, digest, steps, state)

    def _rank(self, name: str, race: Race, trials: list[ActiveTenant]) -> None:
        """Write how the trials of a sweep rank, with the winner's adapter where it is over."""
        ranking = race.ranking(trials, self._members.ended)
        if self._job.is_rank0:
            winner, scored = ranking["winner"], race.sweep.trials[0].tenant.evaluate is not None
            adapter = self._job.out / winner / (BEST if scored else LAST) if winner else None
            try:
                ranking = write_ranking(self._job.out, ranking, adapter)
            except OSError as error:
                logger.warning("the ranking of the sweep %s cannot be written: %s", name, error)
        self.rankings[name] = ranking

    def _set_until(self) -> bool:
        """Until which step everybody takes part; whether anybody who waited for it may go on."""
        goes_on = False
        for tenant in self._members.here:
            race, evaluate = self._races.get(tenant.file), tenant.config.evaluate
            until = race.next_rung(tenant) if race else tenant.steps
            if evaluate is not None and evaluate.patience is not None:
                until = min(until, next_due(evaluate, tenant.step, tenant.steps))
            goes_on |= tenant.step == tenant.until < until
            tenant.until = until
        return goes_on


def _entry(step: int, name: str, row: Mapping[str, Any]) -> Entry:
    """What logs get of a tenant's evaluation, at the number of the job's step that comes next."""
    shown = {key: row["evaluation"][key] for key in ("loss", "perplexity") if row["evaluation"][key] is not None}
    scalars = {f"evenload/tenants/{name}/evaluation/{key}": value for key, value in shown.items()}
    return Entry(step, scalars, {"tenant": name, **row}, always=True)


def _numbers(result: Evaluated, *, best: bool) -> dict[str, Any]:
    finite = math.isfinite(result.loss)
    return {
        "loss": result.loss if finite else None,
        "perplexity": perplexity(result.loss) if finite else None,
        "best": best,
        "sequences": result.sequences,
        "tokens": result.tokens,
        "targets": result.targets,
        "seconds": result.seconds,
    }
