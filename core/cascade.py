"""Scorers from cheap to dear: who lies in the band in which one is unsure goes on (Cascadia, arXiv 2506.04203).

A band holds both of its ends. A sample's score is that of the last scorer that it came to. Of those that stop before
the last one, it scores a share all the same, which a hash has drawn: that corrects the mean (`corrected_mean`), and no
sample's score.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .aliases import Floats, Ints
from .balance.level import level
from .corrected_mean import CorrectedMean, corrected_mean, drawn
from .input.user_function import user_function
from .recipe.generated import Band, PruneRule, ScoredSamples, scorers_of

log = logging.getLogger("evenload")
SEEN = 0.01
"""Share of samples whose errors a mean says how probably it has missed."""


class Cascaded(NamedTuple):
    """What scorers have said of N samples, on R ranks."""

    scores: Floats
    """[N]"""
    dear: Floats
    """By the last scorer [N]; NaN: it was not asked."""
    rescored: NDArray[np.bool_]
    """Whether a sample is of the drawn share [N]."""
    counts: Ints
    """Samples that each scorer has scored [K]."""
    seconds: Floats
    """Seconds of each scorer on each rank [K, R]."""

    @property
    def mean(self) -> CorrectedMean | None:
        """The mean of the last scorer; None where fewer than two samples were drawn."""
        places = np.flatnonzero(self.rescored)
        return corrected_mean(self.scores, self.dear[places], places) if len(places) > 1 else None

    @property
    def figures(self) -> dict[str, float]:
        """Names and numbers for tables, logs and boards; scorers are numbered from 1."""
        row = {"score": float(self.scores.mean())}
        if (mean := self.mean) is not None:
            row = {
                "score": mean.mean,
                "score_low": mean.low,
                "score_high": mean.high,
                "score_uncorrected": row["score"],
            }
            row["missed_frac"] = mean.missed(SEEN)
        row["rescored"] = int(self.rescored.sum())
        for number, (count, took_s) in enumerate(zip(self.counts, self.seconds, strict=True), 1):
            row |= {f"scored_{number}": int(count), f"scorer_{number}_s": float(took_s.sum())}
            row[f"scorer_{number}_busiest_s"] = float(took_s.max())
        return row


def rescored(keys: Sequence[str], share: float, seed: int) -> NDArray[np.bool_]:
    """Whom the last scorer scores in any case [N]: a share, two samples at least; nobody where the share is 0."""
    return drawn(keys, share, seed, least=2 if share else 0)


def functions_of(config: ScoredSamples | PruneRule, section: str) -> list[tuple[str, Callable[..., Any]]]:
    """The scorers of a section, cheap to dear, each after its key. Raises EvenloadError for one that is no function."""
    names = [scorer.by for scorer in scorers_of(config.score)]
    keys = [f"{section}.score{f'.{place}.by' if config.bands else ''}" for place in range(len(names))]
    return [(key, user_function(name, key)) for key, name in zip(keys, names, strict=True)]


def warn_if_lossy(bands: Sequence[Band], rescore: float, where: str, scale: Band | None = None) -> None:
    """Say what it means that nothing corrects cheap scores; ``scale``: all that there may be, None: any number."""
    final = scale is None or any(low > scale[0] or high < scale[1] for low, high in bands)
    if bands and final and rescore == 0:
        text = "%s: rescore is 0, so what a cheap scorer is sure of keeps its score, right or wrong, and the mean is of"
        log.warning(f"{text} these scores; with rescore 0.1 it is that of the last scorer, with its interval", where)


def warn_of_rescore(config: ScoredSamples | PruneRule, section: str, scale: Band | None = None) -> None:
    """Say where a section's share has no effect, or lacks."""
    if not config.bands and "rescore" in config.model_fields_set:
        log.warning("%s.rescore has no effect on a single scorer", section)
    warn_if_lossy(config.bands, config.rescore, section, scale)


Score = Callable[[int, Ints], tuple[Floats, Floats]]
"""From the number of a scorer and places of samples [n] to their scores [n], and seconds of ranks [R]."""


def cascaded(bands: Sequence[Band], rescored: NDArray[np.bool_], score: Score) -> Cascaded:
    """Score samples by one scorer more than there are bands.

    ``rescored`` [N]: whom the last one scores in any case.
    """
    going, counts, seconds = np.arange(len(rescored)), [], []
    scores, dear = np.full(len(rescored), np.nan), np.full(len(rescored), np.nan)
    for number, (low, high) in enumerate(bands):
        scores[going], took_s = score(number, going)
        counts.append(len(going))
        seconds.append(took_s)
        going = going[(low <= scores[going]) & (scores[going] <= high)]
    asked = np.union1d(going, np.flatnonzero(rescored))
    dear[asked], took_s = score(len(bands), asked)
    scores[going] = dear[going]
    return Cascaded(scores, dear, rescored, np.array([*counts, len(asked)]), np.array([*seconds, took_s]))


def joined(parts: Iterable[Cascaded]) -> Cascaded:
    """All samples of several turns of the same scorers on the same ranks."""
    scores, dear, rescored, counts, seconds = zip(*parts, strict=True)
    of_all = np.concatenate(scores), np.concatenate(dear), np.concatenate(rescored)
    return Cascaded(*of_all, np.sum(counts, axis=0), np.sum(seconds, axis=0))


def longest_first(costs: Floats, num_ranks: int) -> list[list[int]]:
    """Places of samples for each rank, evenly by what they cost [N], all above 0; each rank begins with its costliest.

    The same on every rank that has the same costs.
    """
    ranks = level(costs[None], np.ones((1, num_ranks)), np.zeros((1, num_ranks)))
    order = np.argsort(-costs, kind="stable")
    return [order[ranks[order] == rank].tolist() for rank in range(num_ranks)]
