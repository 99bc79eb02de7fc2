"""Scores of batches whose attention leaves blocks of keys out, with what they are off by.

A share of the samples that may leave blocks out, drawn by the hash of their numbers, is in the batch a second time and
dense there: its *twins*. They correct the sum of losses (`core.corrected_mean`) and tell what it is off by. Where the
loss of one is off by more than `sparse.limit`, all is scored again densely, on all ranks together: an error above it in
a share p of the samples leads there with probability 1 - (1 - p)^n, n of them drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.aliases import Floats, Ints
from ..core.corrected_mean import drawn
from ..core.errors import EvenloadError
from ..core.planning.chain import PlanChain
from ..core.planning.forward_only import forward_only, on_single_ranks
from ..core.planning.planner import Draw, Planned
from ..core.sparse_error import SparseError, TwiceScored
from ..integrations.host.scoring import Scores
from ..runtime.attention.choosers import CHOOSERS
from ..runtime.attention.sparse import KeptBlocks, SparsePass
from ..runtime.world.agreement import from_first
from ..runtime.world.replicas import job_group
from .job import Job, logger
from .preflight import refuse_longest

Score = Callable[[Planned, SparsePass | None], Scores]
"""Scores a planned batch. Collective."""


class ScoredBatch(NamedTuple):
    """A batch that was scored once, its twins among it."""

    scores: Scores
    """Without the twins."""
    sparse: Ints
    """Places of the sequences that may leave blocks out."""
    computed: Floats
    """The share of their pairs that was computed."""
    twins: Ints
    """Places of those that were drawn."""
    dense: Floats
    """The losses of these, densely."""


class WholePass(NamedTuple):
    """Batches that were scored together."""

    scores: list[Scores]
    error: SparseError | None
    """What their loss is off by; None where nothing was left out."""
    first: list[Scores]
    """Before they were scored again densely, if they were; losses add up to the corrected sum."""


class SparsePasses:
    """Scores batches of a job's samples as `sparse` has it. Making one is collective, and so is scoring.

    ``least``: so many samples are drawn of those that are scored together, however small the share.
    """

    def __init__(self, job: Job, *, least: int = 0) -> None:
        self._settings = job.recipe.sparse
        self._seed = job.recipe.train.seed
        self._least = least
        self._blocks = KeptBlocks(self._settings.state_bytes)
        self._known = dict[int, float]()
        """The share of its pairs that each sample kept last."""
        self.is_on = self._settings.is_on and bool((job.source.lengths >= self._settings.min_length).any())
        if self.is_on and job_group() is not None:
            logger.info("sparse scoring: samples that replicas divide among them are dense")
            self.is_on = False
        self.chain = _chain_of(job) if self.is_on else forward_only(job.chain)
        """Plans the batches."""

    def draws(self, draws: Sequence[Draw]) -> list[Draw]:
        """Batches with the twins of samples that are drawn, and what each is expected to compute."""
        own = [draw.samples[self._may(draw)] for draw in draws if self.is_on]
        samples = np.concatenate([*own, np.zeros(0, np.int64)])
        if not len(samples):
            return list(draws)
        chosen = drawn(map(str, samples.tolist()), self._settings.dense_share, self._seed, self._least)
        if self._least and chosen.all():
            text = "sparse scoring: %d samples of sparse.min_length or more are too few to draw from; all are dense"
            logger.info(text, len(samples))
            return list(draws)
        return [self._with_twins(draw, samples[chosen]) for draw in draws]

    def whole(self, plans: Callable[[], Iterable[Planned]], score: Score) -> WholePass:
        """The scores of all batches; ``plans`` gives them once more where all is scored again densely. Collective."""
        batches = [self._scored(planned, score) for planned in plans()]
        error = self._error_of(batches)
        scores = own = corrected(batches)
        if error and error.dense:
            scores = [_own(planned.draw, score(planned, None)) for planned in plans()]
        return WholePass(scores, error, own)

    def one(self, planned: Planned, score: Score) -> tuple[Scores, SparseError | None]:
        """The scores of a batch whose losses are meant one by one, those that were drawn densely; what they are off by.
        Collective."""
        batch = self._scored(planned, score)
        if (error := self._error_of([batch])) is not None and error.dense:
            return _own(planned.draw, score(planned, None)), error
        batch.scores.losses[batch.twins] = batch.dense
        return batch.scores, error

    def _error_of(self, batches: Sequence[ScoredBatch]) -> SparseError | None:
        """What losses are off by, and whether that is too much: as rank 0 has it, so that all do alike. Collective."""
        if not any(len(one.sparse) for one in batches):
            return None
        computed, dense = (np.concatenate([getattr(one, name) for one in batches]) for name in ("computed", "dense"))
        cheap = np.concatenate([one.scores.losses[one.sparse] for one in batches])
        places = np.flatnonzero(np.concatenate([np.isin(one.sparse, one.twins) for one in batches]))
        rest = sum(float(one.scores.losses.sum()) for one in batches) - float(cheap.sum())
        targets = sum(int(one.scores.targets.sum()) for one in batches)
        settings, losses = self._settings, TwiceScored(cheap, dense, places, rest, targets)
        error = from_first(lambda: losses.error(settings.choose, settings.limit, computed))
        if error and error.dense:
            text = "sparse scoring: the loss of a sample is off by %.2g, above sparse.limit %g: all is scored densely"
            logger.warning(text, error.worst, self._settings.limit)
        return error

    def _may(self, draw: Draw) -> NDArray[np.bool_]:
        return draw.lengths >= self._settings.min_length

    def _with_twins(self, draw: Draw, taken: Ints) -> Draw:
        may = self._may(draw)
        twins = np.flatnonzero(np.isin(draw.samples, taken) & may)
        mean = float(np.mean([*self._known.values()] or [1.0]))
        shares = [self._known.get(sample, mean) for sample in draw.samples.tolist()]
        computes = np.concatenate([np.where(may, shares, 1.0), np.ones(len(twins))])
        return draw.at(np.concatenate([np.arange(len(may)), twins]))._replace(twins=twins, computes=computes)

    def _scored(self, planned: Planned, score: Score) -> ScoredBatch:
        draw, none = planned.draw, np.zeros(0, np.int64)
        if draw.twins is None:
            return ScoredBatch(score(planned, None), none, np.zeros(0), none, np.zeros(0))
        own = draw.own
        sparse = np.flatnonzero(self._may(own))
        names: list[str | None] = [None] * len(draw.samples)
        for place in sparse.tolist():
            names[place] = str(draw.samples[place])
        run = SparsePass(CHOOSERS[self._settings.choose], self._settings.mass, names, self._blocks)
        scores, pairs = score(planned, run), run.pairs()
        self._known |= zip(draw.samples[sparse].tolist(), pairs.kept[sparse].tolist(), strict=True)
        dense = scores.losses[len(own.samples) :]
        return ScoredBatch(_own(draw, scores), sparse, pairs.computed[sparse], draw.twins, dense)


def corrected(batches: Sequence[ScoredBatch]) -> list[Scores]:
    """The scores of batches, with losses whose sum is the corrected one: the error of each that was drawn stands for
    those of as many samples as there are to one that is drawn. So sums over some of them, such as those of a domain,
    are without bias, too."""
    samples, twins = (sum(len(getattr(one, name)) for one in batches) for name in ("sparse", "twins"))
    for one in batches:
        own = one.scores.losses
        own[one.twins] += samples / max(1, twins) * (one.dense - own[one.twins])
    return [one.scores for one in batches]


def _chain_of(job: Job) -> PlanChain:
    """The chain that scores: each sample on one rank, where one can hold the longest."""
    chain = replace(forward_only(job.chain), trees=False)
    if not chain.shares:
        return chain
    try:
        refuse_longest(job.source, alone := on_single_ranks(chain))
    except EvenloadError as error:
        text = "sparse scoring: one rank cannot hold the longest sample (%s): those that ranks share are dense"
        logger.info(text, error.found)
        return chain
    return alone


def _own(draw: Draw, scores: Scores) -> Scores:
    """The scores of a batch without its twins."""
    own = len(draw.own.samples)
    return scores._replace(losses=scores.losses[:own].copy(), targets=scores.targets[:own])
