"""One planned step, measured on all ranks, and baselines that plan its batch: what `train` and `bench` have in common.

Variants take turns on every batch, and the order rotates from step to step, so that drift of the machine's speed meets
all alike. The speedup is the ratio of totals, a baseline's seconds over evenload's in the same steps. It comes with the
interval that covers the true one in 95 of 100 runs where noise is as often above as below, whatever its distribution
(typical values of subsamples: Hartigan, JASA 64, 1969). An interval that holds 1 shows no difference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.planning.chain import PlanChain
from ..core.planning.planner import Draw, Planned, Planner
from ..core.recipe.adapter import TenantTrain
from ..core.recipe.sections import Train
from ..core.simulate.step import Span
from ..integrations.host.host import Rates
from ..runtime.world.agreement import everyone
from .early_end import EarlyEnd, reason_of
from .expert_loads import metrics_of
from .job import VerbJob
from .metrics import MeasuredStep
from .pipelines import Place
from .replicas import of_all_replicas
from .stragglers import OwnTime

OURS = "evenload"
"""The name under which the recipe's own run stands next to its baselines."""
MISSES = 0.05
"""How often an interval may miss the true speedup."""
MOST_ENUMERATED = 10
"""Of more steps than this, 1,023 subsets are drawn in place of all."""


class BaselinePlanner:
    """Plans the batches that evenload's planner has drawn, as a baseline would."""

    def __init__(self, chain: PlanChain, first: PlanChain | None = None) -> None:
        self._drawn: list[Draw] = []
        self.planner = Planner(chain, self._drawn.pop, background=False, first=first)

    def plan(self, draw: Draw) -> Planned:
        """The plan of a batch. No step is charged with the time it took, which favours the baseline."""
        self._drawn.append(draw)
        return replace(self.planner.next(), waited_s=0.0)


def measure_step(
    job: VerbJob,
    planned: Planned,
    step: int,
    *,
    record: bool,
    rates: Rates | None = None,
    ending: EarlyEnd | None = None,
) -> MeasuredStep:
    """Train one step with all ranks, which line up before it if it is recorded; ``rates``: of tenants; ``ending``: why
    the run may have to end with it. Collective."""
    if record:
        job.watchdog.at("lining up", step, waits=True)
        job.gather(0.0)
    start = time.perf_counter()
    own = OwnTime()
    result = job.host.train_step(
        planned.plan,
        own.reading(job.tokens_of(planned.draw)),
        lr=learning_rate(step, job.recipe.train) if rates is None else rates,
        labels=job.labels_of(planned.draw),
        mark=lambda where: job.watchdog.at(where, step),
        record=record,
        company=job.company_of(planned.draw),
    )
    step_s = time.perf_counter() - start + planned.waited_s
    job.watchdog.at("comparing times", step, waits=True)
    stop_code = ending.stop_code(step_s) if ending else 0
    host_s = own.host_s() + planned.waited_s
    rows = job.gather(
        step_s, planned.plan_s, planned.waited_s, stop_code, result.busy_s, result.forward_s, own.data_s, host_s
    )
    own_s, plan_s, wait_s, heard = rows[:, :4].max(axis=0).tolist()
    replicas, slowest_s, heard = of_all_replicas(planned, step, float(rows[:, 4].max()), own_s, heard)
    seconds = job.of_stages(rows[:, 4:6])
    of_ranks_s = rows[:, [4, 6, 7]]
    spans = gather_spans(result.spans) if record else []
    moe = metrics_of(result) if job.has_experts else None
    ends = reason_of(heard)
    return MeasuredStep(
        result, slowest_s, plan_s, wait_s, seconds[..., 0], seconds[..., 1], of_ranks_s, moe, spans, ends, replicas
    )


def in_turn(names: Sequence[str], turn: int) -> list[str]:
    """The names in the order in which they take this turn."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def compare(baseline_s: Sequence[float], own_s: Sequence[float]) -> dict[str, Any]:
    """How much faster evenload is, from the seconds of the same steps; of no steps nothing is known.

    ``of_totals`` is the speedup, the ratio of the sums, and ``interval`` holds the true one with a confidence of 95 %;
    it is None where the steps are fewer than six. ``median`` is that of the steps' ratios.
    """
    ratios = np.array(baseline_s) / np.array(own_s)
    total_s = sum(own_s)
    return {
        "steps": len(ratios),
        "of_totals": sum(baseline_s) / total_s if total_s else None,
        "median": float(np.median(ratios)) if len(ratios) else None,
        "interval": interval_of_totals(baseline_s, own_s),
    }


def interval_of_totals(baseline_s: Sequence[float], own_s: Sequence[float]) -> list[float] | None:
    """[low, high] around the true ratio of totals with a confidence of at least 95 %; None where steps are too few.

    The ratios of totals of all subsets of the steps part the line into intervals, each of which holds the true ratio
    equally often.
    """
    count = len(own_s)
    if count > MOST_ENUMERATED:
        subsets = np.random.default_rng(0).integers(0, 2, (2**MOST_ENUMERATED - 1, count))
        subsets[~subsets.any(axis=1)] = 1
    else:
        subsets = np.arange(1, 2**count)[:, None] >> np.arange(count) & 1
    outside = int(MISSES / 2 * (len(subsets) + 1))
    if not outside:
        return None
    ratios = np.sort(subsets @ np.array(baseline_s) / (subsets @ np.array(own_s)))
    return [float(ratios[outside - 1]), float(ratios[-outside])]


def learning_rate(step: int, config: Train | TenantTrain, steps: int | None = None) -> float:
    """A function of the step alone, so that a resumed run continues it. Warm-up is linear. ``steps``: how many there
    are in all, where that is another number than the config's."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, (steps or config.steps) - config.warmup_steps)
    shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return config.min_lr + (config.lr - config.min_lr) * shape[config.lr_schedule]


def gather_spans(own: tuple[Span, ...]) -> list[Span]:
    """What all ranks recorded of a step, of tensor-parallel peers the first, without what is waiting. Collective."""
    return list(_shown(everyone(own)))


def _shown(ranks: Sequence[tuple[Span, ...]]) -> Iterator[Span]:
    """The spans of one rank for each (stage, plane rank), its tensor-parallel peers left out, without what is waiting.
    A collective begins when its last rank has come: the gradient sum of a stage, the update of all stages."""
    places: dict[Place, tuple[Span, ...]] = {}
    for spans in ranks:
        if spans:
            places.setdefault(spans[0][:2], spans)
    latest: dict[tuple[str, int], float] = {}
    for span in (span for spans in places.values() for span in spans):
        latest[_meeting(span)] = max(latest.get(_meeting(span), 0.0), span.start_s)
    for spans in places.values():
        for span in spans:
            together = span.kind in "GU"
            yield span._replace(start_s=min(latest[_meeting(span)], span.end_s)) if together else span


def _meeting(span: Span) -> tuple[str, int]:
    return span.kind, span.stage if span.kind == "G" else -1
