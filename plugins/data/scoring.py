"""Losses of any samples by the model of a run as it is, between two steps, and gradients of samples.

Batches are those of a global batch's size, planned with the costs of the recipe, one ahead of the one that is scored.
Nothing that training draws or plans is touched. Losses are of plans that run forward only; where `sparse` leaves blocks
of keys out, vectors are dense all the same. Gradients, for selections by gradient, are by one backward of each pack
(`Host.gradient_scores`), so that a run needs no second model; `data.validation` says what is wanted, and its domains
are the tasks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.planning.planner import Draw, Planned
from ...core.sparse_error import SparseError, together
from ...integrations.host.gradients import GradientSettings, PlannedSamples
from ...integrations.host.scoring import Scores
from ...runtime.attention.sparse import SparsePass, say_dense
from ...training.drawing import batch_size, draw_of, draws_of
from ...training.job import Job, logger
from ...training.sparse_passes import SparsePasses
from ...training.step_hooks import StepHook


class Scorer(StepHook):
    """Scores samples of a job's source that have targets. Making one is collective, and so are its methods.
    ``backward``: its plans are those of a training step. ``least``: as `SparsePasses` has it."""

    def __init__(self, job: Job, *, backward: bool = False, least: int = 0) -> None:
        self.passes = None if backward else SparsePasses(job, least=least)
        self._job = replace(job, chain=self.passes.chain if self.passes else job.chain, reference=None)
        self._size = batch_size(job.recipe).mean_samples(job.source.lengths)
        self._draws: list[Draw] = []
        self._planner = self._job.planner(lambda: self._draws.pop(0), self._job.chain)
        self.seconds = 0.0
        """By the wall clock of this rank, in all."""
        self._errors: list[SparseError] = []

    def plans(self, samples: Ints, *, sparse: bool = False) -> Iterator[Planned]:
        """The plans of these samples, batch by batch; ``sparse``: attention may leave blocks out. Collective."""
        starts = range(0, len(samples), self._size)
        parts = [np.asarray(samples[start : start + self._size], np.int64) for start in starts]
        draws = [draw_of(self._job.source, part)._replace(own_sums=None, divisor=None) for part in parts]
        self._draws = self.passes.draws(draws) if self.passes and sparse else draws
        for number in range(len(parts)):
            self._job.watchdog.at("waiting for the plan of samples to score")
            yield self._planner.next(ahead=len(parts) - 1 - number)

    def batches(self, samples: Ints) -> Iterator[PlannedSamples]:
        """Plans of these samples, batch by batch, with tokens and labels. Collective."""
        for planned in self.plans(samples):
            draw = planned.draw
            yield PlannedSamples(planned.plan, self._job.tokens_of(draw), self._job.labels_of(draw))

    def scores(self, samples: Ints, *, vectors: bool = False) -> Scores:
        """The losses of these samples, in their order, the same on every rank, and ``vectors`` of their last hidden
        states. Collective."""
        begin = time.perf_counter()
        parts = [self._scored(planned, vectors) for planned in self.plans(samples, sparse=not vectors)]
        self.seconds += time.perf_counter() - begin
        losses, targets = (np.concatenate(columns) for columns in zip(*(one[:2] for one in parts), strict=True))
        rows = [one.vectors for one in parts if one.vectors is not None]
        return Scores(losses, targets, vectors=np.concatenate(rows) if rows else None)

    def _scored(self, planned: Planned, vectors: bool) -> Scores:
        """The scores of a batch, which are sparse where the recipe has it so. Collective."""

        def score(planned: Planned, sparse: SparsePass | None) -> Scores:
            tokens_of, labels = self._job.tokens_of(planned.draw), self._job.labels_of(planned.draw)
            return self._job.host.score(
                planned.plan, tokens_of, labels=labels, mark=self._mark, vectors=vectors, sparse=sparse
            )

        if self.passes is None:
            return score(planned, None)
        if vectors and self.passes.is_on:
            say_dense("of passes that give vectors of samples")
        scores, error = self.passes.one(planned, score)
        if error:
            self._errors.append(error)
        return scores

    def means(self, samples: Ints) -> Floats:
        """float64 [S] mean token loss of each. Collective."""
        scores = self.scores(samples)
        means: Floats = scores.losses / scores.targets
        return means

    def report(self, train_s: float) -> dict[str, Any]:
        """Seconds that scoring took, in all."""
        if self.seconds:
            logger.info("scoring samples took %.1f s, the steps %.1f s", self.seconds, train_s)
        if (error := together(self._errors)) is None:
            return {"scoring_s": self.seconds}
        logger.info("losses of single samples, no mean of them: %s", error.text)
        return {"scoring_s": self.seconds, "scoring_sparse": asdict(error)}

    def _mark(self, where: str) -> None:
        self._job.watchdog.at(f"scoring, {where}")


class PoolGradients(NamedTuple):
    """What `Pool` takes of them, by its names."""

    gradients: Floats
    query_gradients: Floats
    tasks: Ints | None


class GradientScorer:
    """Takes gradients of samples of a job's source, along with those of its validation. Methods are collective."""

    def __init__(self, job: Job) -> None:
        assert job.held_out is not None
        self._host = job.host
        self._settings = GradientSettings(seed=job.recipe.train.seed)
        draws = draws_of(job.held_out, job.recipe)
        domains = [draw.domain for draw in draws if draw.domain is not None]
        self._wanted = np.concatenate([draw.samples for draw in draws])
        self._tasks = np.concatenate(domains) if domains else None
        self._own, self._held_out = (Scorer(one, backward=True) for one in (job, replace(job, source=job.held_out)))
        self.seconds = 0.0
        """By the wall clock of this rank, in all."""

    def of(self, samples: Ints) -> PoolGradients:
        """Projected gradients [N, k] of these samples, in their order, and those of the validation; of no samples
        none of either. The same on every rank."""
        begin, none = time.perf_counter(), np.zeros((0, self._settings.columns))
        if not len(samples):
            return PoolGradients(none, none, None)
        with self._host.gradient_scores(self._settings) as scores:
            rows = scores.of_pool(self._own.batches(samples))
            wanted = scores.of_pool(self._held_out.batches(self._wanted))
        self.seconds += time.perf_counter() - begin
        return PoolGradients(rows, wanted, self._tasks)
