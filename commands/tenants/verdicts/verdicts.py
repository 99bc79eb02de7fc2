"""Where tenants are evaluated, where they stop, and where sweeps drop trials: between two steps, by all ranks alike.

A tenant whose going on is decided behind a step takes part up to it (`ActiveTenant.until`), so no batch of a later step
is drawn before the verdict; everybody else's batches stay planned ahead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ....core.errors import EvenloadError
from ..crew import Crew
from ..job import TenantJob
from ..output import BEST, LAST, Output
from ..tenant import ENDED, ActiveTenant
from .evaluation import Evaluated, Evaluations, HeldOut, held_out_of
from .race import Race
from .ranking import write_ranking
from .stopping import is_due, is_over, perplexity
from .trials import Sweep

logger = logging.getLogger("evenload")


class Verdicts:
    """See the module. ``saved``: what `state` gave before the job was resumed."""

    def __init__(self, job: TenantJob, output: Output, crew: Crew, saved: Mapping[str, Any] | None = None) -> None:
        self._job, self._output, self._crew = job, output, crew
        self._evaluations = Evaluations(job)
        self._held_out: dict[int, HeldOut] = {}
        self._races: dict[str, Race] = {}
        """Of sweeps by name."""
        self._saved = dict(saved or {})

    def begin(self, step: int) -> None:
        """Evaluate those who take part and have not begun, and set until when all take part. Collective."""
        new = [one for one in self._crew.active if one.step == 0 and one.config.evaluate and one.best is None]
        self._evaluate(new, step)
        for name, sweep in self._crew.sweeps.items():
            if name not in self._races or self._races[name].sweep is not sweep:
                trials = [one for one in self._crew.tenants if one.file == name]
                steps = trials[0].steps if trials else sweep.trials[0].tenant.train.steps
                self._races[name] = Race(sweep, steps, self._saved.pop(name, None))
        for tenant in self._crew.here:
            self._set_until(tenant)

    def after(self, trained: Iterable[ActiveTenant], step: int) -> bool:
        """Evaluate those who were trained in a step and are due, and end those who stop there or are dropped.
        Whether anybody goes on whose next batch was not drawn ahead. Collective."""
        trained = list(trained)
        self._evaluate([one for one in trained if one.config.evaluate and _is_due(one)], step)
        held = [one for one in self._crew.here if one.step == one.until < one.steps]
        for tenant in trained:
            if tenant.state not in ENDED and tenant.step == tenant.steps:
                self._crew.end(tenant, "done")
        self.race()
        return any(one.state not in ENDED and one.until > one.step for one in held)

    def race(self) -> None:
        """Close the rungs that can be closed, and write the rankings that have changed. Collective."""
        for name, race in self._races.items():
            trials = race.trials(self._crew.tenants)
            race.take_down(trials)
            while verdict := race.close():
                for tenant in trials:
                    if tenant.name in verdict.dropped and tenant.state not in ENDED:
                        self._crew.end(tenant, "dropped", f"in the worse half of the sweep {name} at rung {verdict.rung}")
                race.take_down(trials)
            self._rank(race)
        for tenant in self._crew.here:
            self._set_until(tenant)
        self._make_place()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, ready for JSON."""
        return {name: race.state() for name, race in self._races.items()}

    @property
    def rankings(self) -> list[dict[str, Any]]:
        """Of all sweeps, as they were written last."""
        return [race.written for race in self._races.values() if race.written]
