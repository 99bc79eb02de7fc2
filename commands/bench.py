"""evenload against baselines, alternating on the same batches in one run of one model.

Every step each variant plans and trains the same global batch; the order rotates, so that drift of the machine's speed
meets all alike. ``of_totals`` is a baseline's seconds over evenload's, all steps summed; ``median`` and ``quartiles``
are of the ratios step by step. A baseline's ceiling is its own measured imbalance, busiest rank over mean with steps
summed: what balance alone can gain. ``of_ceiling`` compares it with ``of_totals``, which weighs steps alike.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..core.planner import Planned, Planner, alone
from ..core.recipe import Recipe
from .job import Job, run_rank
from .show import progress
from .train import learning_rate

OURS = "evenload"
WARMUP_STEPS = 1


@dataclass
class Measured:
    """One variant's numbers, a list entry a step."""

    step_s: list[float] = field(default_factory=list)
    busy: list[Any] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    padding_frac: list[float] = field(default_factory=list)
    plan_wait_s: list[float] = field(default_factory=list)
    loss: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / sum(self.step_s)

    @property
    def imbalance(self) -> float:
        """Busiest over mean rank: seconds summed over steps, so that long steps count for more."""
        return self.busiest_s / float(np.mean(self.busy, axis=1).sum())

    @property
    def busiest_s(self) -> float:
        """Seconds of each step's busiest rank, summed: the time of compute where every rank has cores of its own."""
        return float(np.max(self.busy, axis=1).sum())


def bench(recipe: Recipe, against: tuple[str, ...]) -> dict[str, Any] | None:
    """Measure on this rank."""
    return run_rank(recipe, lambda job: _bench(job, against))


def _bench(job: Job, against: tuple[str, ...]) -> dict[str, Any]:
    recipe = job.recipe
    names = [*against, OURS]
    planner = job.planner(job.drawing())
    measured = {name: Measured() for name in names}
    with progress(job.leads) as bar, bar.task("bench", (recipe.train.steps + WARMUP_STEPS) * len(names)) as tick:
        for step in range(recipe.train.steps + WARMUP_STEPS):
            job.watchdog.at("waiting for the plan", step)
            ours = planner.next()
            for name in names[step % len(names) :] + names[: step % len(names)]:
                planned = ours if name == OURS else _planned(job, name, ours)
                _measure(job, planned, step, measured[name] if step >= WARMUP_STEPS else Measured())
                tick(name)
    return _result(job, measured)


def _planned(job: Job, name: str, ours: Planned) -> Planned:
    """A baseline's plan of the same batch; its planning is not counted, which favours it."""
    chain = replace(job.chain, instead=name)
    return Planner(chain, lambda: ours.draw, background=False, exchange=alone).next()


def _measure(job: Job, planned: Planned, step: int, into: Measured) -> None:
    job.watchdog.at("lining up", step, waits=True)
    job.gather(0.0)
    start = time.perf_counter()
    result = job.host.train_step(
        planned.plan,
        job.tokens_of(planned.draw),
        lr=learning_rate(step, job.recipe.train),
        mark=lambda where: job.watchdog.at(where, step),
    )
    step_s = time.perf_counter() - start
    job.watchdog.at("comparing times", step, waits=True)
    rows = job.gather(step_s, result.busy_s, planned.waited_s)
    wait_s = float(rows[:, 2].max())
    into.step_s.append(float(rows[:, 0].max()) + wait_s)
    into.busy.append(job.of_plane(rows[:, 1]))
    into.tokens.append(planned.plan.num_tokens)
    into.padding_frac.append(planned.plan.padding_frac)
    into.plan_wait_s.append(wait_s)
    into.loss = result.loss


def _result(job: Job, measured: dict[str, Measured]) -> dict[str, Any]:
    ours = measured[OURS]
    ratio = {}
    for name, baseline in measured.items():
        if name != OURS:
            each = np.array(baseline.step_s) / np.array(ours.step_s)
            low, median, high = np.quantile(each, [0.25, 0.5, 0.75]).tolist()
            ratio[name] = {
                "median": median,
                "quartiles": [low, high],
                "of_totals": sum(baseline.step_s) / sum(ours.step_s),
                "of_busiest": baseline.busiest_s / ours.busiest_s,
                "ceiling": baseline.imbalance,
                "of_ceiling": sum(baseline.step_s) / sum(ours.step_s) / baseline.imbalance,
            }
    return {
        "host": job.host.describe(),
        "recipe": job.recipe.model_dump(mode="json", exclude_defaults=True),
        "steps": len(ours.step_s),
        "tokens_per_s": {name: m.tokens_per_s for name, m in measured.items()},
        "imbalance": {name: m.imbalance for name, m in measured.items()},
        "padding_frac": {name: float(np.mean(m.padding_frac)) for name, m in measured.items()},
        "loss": {name: m.loss for name, m in measured.items()},
        "plan_share": sum(ours.plan_wait_s) / sum(ours.step_s),
        "ratio": ratio,
    }
