"""Held-out samples of tenants, scored through the adapter of each: forward-only plans that several tenants share.

Each tenant is scored on the same samples in the same batches every time. Batch i of all tenants that are due together
is one plan, so that short evaluations fill the ranks as training does. Nothing that training draws or plans is touched,
and scoring changes no state of the host, so losses of training are the same to the last bit with and without it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....core.errors import EvenloadError
from ....core.planning.forward_only import forward_only
from ....core.planning.planner import Draw, Planned
from ....core.recipe.tenant import Evaluate
from ....data.samples.order import SampleOrder
from ....data.sources import Source
from ....integrations.scoring import Scores
from ....runtime.attention.labels import Labels
from ....runtime.attention.pack import TokensOf
from ..._shared.job import Work
from ...validation.draws import scorable


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
    """The batches of a tenant's evaluations. Raises EvenloadError where no sample has a target."""
    numbers = scorable(source)
    if not len(numbers):
        detail = f"{len(source.lengths)} samples of {evaluate.source}"
        raise EvenloadError("no sample of evaluate.source has a target", detail, "use samples with targets")
    count = len(numbers) if evaluate.batches is None else min(len(numbers), evaluate.batches * batch_size)
    taken, _ = SampleOrder(len(numbers), seed).take(count)
    samples = numbers[taken]
    return HeldOut(number, source, tuple(samples[first : first + batch_size] for first in range(0, count, batch_size)))


def union_of(due: Sequence[HeldOut]) -> list[Draw]:
    """The batches that several tenants are scored in; each holds one of every tenant that has one left."""
    draws = []
    for place in range(max(len(one.batches) for one in due)):
        parts = [(one, one.batches[place]) for one in due if place < len(one.batches)]
        lengths = np.concatenate([one.source.lengths[samples] for one, samples in parts])
        tenants = np.concatenate([np.full(len(samples), one.number, dtype=np.int64) for one, samples in parts])
        targets = np.concatenate([_targets(one.source)[samples] for one, samples in parts])
        draws.append(Draw(np.concatenate([s for _, s in parts]), lengths, {}, targets=targets, tenants=tenants))
    return draws


class Evaluations:
    """Scores tenants of a job, all ranks together."""

    def __init__(self, job: Work) -> None:
        self._job = job
        self._waiting: deque[Draw] = deque()
        self._planner = job.planner(self._waiting.popleft, forward_only(job.chain))
        self._plans: tuple[tuple[int, ...], list[Planned]] = ((), [])
        """Of the tenants that were scored together last: often the same ones are due again."""

    def run(self, due: Sequence[HeldOut], step: int) -> dict[int, Evaluated]:
        """The losses of tenants by their numbers, after so many steps of the job. Collective."""
        begin = time.perf_counter()
        sources = {one.number: one.source for one in due}
        parts = [(planned.draw, self._score(planned, sources, step)) for planned in self._planned(due, step)]
        seconds = time.perf_counter() - begin
        return {one.number: _sum_of(one.number, parts, seconds) for one in due}

    def _planned(self, due: Sequence[HeldOut], step: int) -> list[Planned]:
        numbers = tuple(one.number for one in due)
        if self._plans[0] != numbers:
            self._job.watchdog.at("waiting for the plan of an evaluation", step)
            self._waiting.extend(union_of(due))
            self._plans = numbers, [self._planner.next(ahead=left > 1) for left in range(len(self._waiting), 0, -1)]
        return self._plans[1]

    def _score(self, planned: Planned, sources: Mapping[int, Source], step: int) -> Scores:
        tokens_of, labels = readers_of(planned.draw, sources)
        return self._job.host.score(
            planned.plan,
            tokens_of,
            labels=labels,
            mark=lambda where: self._job.watchdog.at(f"evaluation, {where}", step),
        )


def readers_of(draw: Draw, sources: Mapping[int, Source]) -> tuple[TokensOf, Labels]:
    """What reads tokens and labels of a batch of several tenants, by the sources of their numbers."""
    assert draw.tenants is not None
    assert draw.targets is not None
    owners, samples = draw.tenants.tolist(), draw.samples.tolist()
    labels = Labels(lambda index: sources[owners[index]].labels(samples[index]), draw.targets)
    return (lambda index: sources[owners[index]].tokens(samples[index])), labels


def _targets(source: Source) -> NDArray[np.int64]:
    return np.maximum(source.lengths - 1, 0) if source.targets is None else source.targets


def _sum_of(number: int, parts: Sequence[tuple[Draw, Scores]], seconds: float) -> Evaluated:
    loss_sum, sequences, tokens, targets = 0.0, 0, 0, 0
    for draw, scores in parts:
        own = draw.tenants == number
        loss_sum += math.fsum(scores.losses[own])
        sequences += int(np.count_nonzero(own))
        tokens += int(draw.lengths[own].sum())
        targets += int(scores.targets[own].sum())
    return Evaluated(loss_sum / targets, sequences, tokens, targets, seconds)
