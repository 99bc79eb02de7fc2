"""Held-out samples of tenants, scored through the adapter of each: forward-only plans that several tenants share.

Each tenant is scored on the same samples in the same batches every time. Batch i of all tenants that are due together
is one plan, so that short evaluations fill the ranks as training does. Nothing that training draws or plans is touched,
and scoring changes no state of the host, so losses of training are the same to the last bit with and without it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....core.planning.forward_only import forward_only
from ....core.planning.planner import Draw, Planned
from ....data.sources import Source, targets_of
from ....integrations.host.scoring import Scores, of_all_replicas
from ....runtime.world.agreement import everyone
from ....training.drawing import held_out_batches
from ....training.replicas import company_of, whole_of
from ..arrivals.job import TenantJob, TenantSamples
from ..tenant_file import Evaluate


class HeldOut(NamedTuple):
    """What a tenant is scored on."""

    number: int
    """Of the tenant."""
    source: Source
    batches: tuple[NDArray[np.int64], ...]
    """Numbers of samples."""


class Evaluated(NamedTuple):
    """What one evaluation of a tenant came to."""

    loss: float
    """Sum of all token losses over the number of targets, in nats."""
    sequences: int
    tokens: int
    targets: int
    seconds: float
    """By the wall clock, of all tenants that were scored together."""


def held_out_of(number: int, source: Source, evaluate: Evaluate, batch_size: int, seed: int) -> HeldOut:
    """The batches of a tenant's evaluations, of samples that have a target."""
    return HeldOut(number, source, tuple(held_out_batches(source, evaluate.batches, batch_size, seed)))


def union_of(due: Sequence[HeldOut]) -> list[Draw]:
    """The batches that several tenants are scored in; each holds one of every tenant that has one left."""
    draws = []
    for place in range(max(len(one.batches) for one in due)):
        parts = [(one, one.batches[place]) for one in due if place < len(one.batches)]
        lengths = np.concatenate([one.source.lengths[samples] for one, samples in parts])
        tenants = np.concatenate([np.full(len(samples), one.number, dtype=np.int64) for one, samples in parts])
        targets = np.concatenate([targets_of(one.source)[samples] for one, samples in parts])
        draws.append(Draw(np.concatenate([s for _, s in parts]), lengths, {}, targets=targets, tenants=tenants))
    return draws


class Evaluations:
    """Scores tenants of a job, all ranks together."""

    def __init__(self, job: TenantJob) -> None:
        self._job, self._samples = job, TenantSamples()
        self._waiting: deque[Draw] = deque()
        self._planner = job.planner(self._waiting.popleft, forward_only(job.chain))
        self._plans: tuple[tuple[int, ...], list[Planned]] = ((), [])
        """Of the tenants that were scored together last: often the same ones are due again."""

    def run(self, due: Sequence[HeldOut], step: int) -> tuple[dict[int, Evaluated], dict[int, str]]:
        """The losses of tenants by their numbers, after so many steps of the job, and what is wrong with the samples of
        those that have none. Collective."""
        begin, faults = time.perf_counter(), dict[int, str]()
        while True:
            able = [one for one in due if one.number not in faults]
            self._samples.sources = {one.number: one.source for one in able}
            parts, more = self._scored(self._planned(able, step), step) if able else ([], {})
            if not more:
                seconds = time.perf_counter() - begin
                return {one.number: _sum_of(one.number, parts, seconds) for one in able}, faults
            faults |= more

    def _planned(self, due: Sequence[HeldOut], step: int) -> list[Planned]:
        numbers = tuple(one.number for one in due)
        if self._plans[0] != numbers:
            self._job.watchdog.at("waiting for the plan of an evaluation", step)
            self._waiting.extend(map(self._job.replicas.part_of, union_of(due)))
            self._plans = numbers, [self._planner.next(ahead=left - 1) for left in range(len(self._waiting), 0, -1)]
        return self._plans[1]

    def _scored(self, plans: Sequence[Planned], step: int) -> tuple[list[tuple[Draw, Scores]], dict[int, str]]:
        """The losses of batches; or what is wrong with samples of tenants, by number, where any cannot be read."""
        job, parts = self._job, list[tuple[Draw, Scores]]()
        for planned in plans:
            faults = self._samples.read(planned, job.host.dp_cp_rank)
            job.watchdog.at("agreeing on the samples of an evaluation", step, waits=True)
            if any(reports := everyone(faults, "job")):
                return [], {number: text for of_rank in reversed(reports) for number, text in of_rank.items()}
            scores = job.host.score(
                planned.plan,
                self._samples.tokens_of(planned.draw),
                labels=self._samples.labels_of(planned.draw),
                mark=lambda where: job.watchdog.at(f"evaluation, {where}", step),
            )
            whole = whole_of(planned.draw)
            company = company_of(planned.draw, self._samples.labels_of(whole))
            parts.append((whole, of_all_replicas(scores, company)))
        return parts, {}


def _sum_of(number: int, parts: Sequence[tuple[Draw, Scores]], seconds: float) -> Evaluated:
    loss_sum, sequences, tokens, targets = 0.0, 0, 0, 0
    for draw, scores in parts:
        own = draw.tenants == number
        loss_sum += math.fsum(scores.losses[own])
        sequences += int(np.count_nonzero(own))
        tokens += int(draw.lengths[own].sum())
        targets += int(scores.targets[own].sum())
    return Evaluated(loss_sum / targets, sequences, tokens, targets, seconds)


def is_due(evaluate: Evaluate, done: int, steps: int) -> bool:
    """Whether to evaluate a tenant that has trained so many of its steps."""
    return done % evaluate.every == 0 or done == steps


def next_due(evaluate: Evaluate, done: int, steps: int) -> int:
    """Steps after which the next evaluation comes."""
    return min(steps, (done // evaluate.every + 1) * evaluate.every)


def without_gain(evaluate: Evaluate, done: int, best_step: int, steps: int) -> int:
    """Evaluations up to this step since the one of lowest loss, which was after ``best_step``."""
    last = done == steps and done % evaluate.every != 0 and best_step < done
    return done // evaluate.every - best_step // evaluate.every + last


def is_over(evaluate: Evaluate, done: int, best_step: int, steps: int) -> bool:
    """Whether patience is at its end."""
    return evaluate.patience is not None and without_gain(evaluate, done, best_step, steps) >= evaluate.patience
