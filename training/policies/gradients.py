"""Gradients of the samples of a pool, and of those of the validation, for selections by gradient, between two steps.

Both are of the weights as they are, by one backward of each pack (`Host.gradient_scores`), so that a run needs no
second model; `data.validation` says what is wanted, and its domains are the tasks.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from ...integrations.host.gradients import GradientSettings
from ..drawing import draws_of
from ..job import Job
from .scoring import Scorer


class PoolGradients(NamedTuple):
    """What `Pool` takes of them, by its names."""

    gradients: Floats
    query_gradients: Floats
    tasks: Ints | None


class GradientScorer:
    """Takes gradients of samples of a job's source, beside those of its validation. Methods are collective."""

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
