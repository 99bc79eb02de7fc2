"""Drafts: guesses of a sample's next tokens, which one forward checks together.

    d_1 .. d_k    guesses; the forward computes the last token of the sample and these
    p_0 .. p_k    what is picked after each, by the rule and the noise of its place
    next tokens   p_0 .. p_a, where d_1 .. d_a are those guesses that equal p_0 .. p_(a-1) up to the first that does not

A guess is never taken for its own probability: what comes out are picks, and each is made after the tokens that stand
before it. So a draft changes when a token is computed, not which it is. Keys of guesses that were wrong lie after the
end of the sample, where nobody sees them, and are written over.

A guess costs a row of its forward, and saves with probability V, that it and those before it are right, a row of a
later one:  V > row_s / (row_s + step_s / live samples + key_s keys), or it is left out. V falls from guess to guess, so
those of a sample are taken up to the first that does not pay; of many live samples less is drafted, or nothing.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from ...core.costs.decode import DecodeCost
from ..attention.decode_rows import MOST_TOKENS
from .request import Drafter
from .schedule import Running

log = logging.getLogger("evenload")

_PROPORTIONS = DecodeCost(step_s=1.0, row_s=1 / 64, key_s=0.0, prompt_s=0.0)
MOST = MOST_TOKENS - 1
"""Guesses of a sample in one forward."""


class DraftCounts(NamedTuple):
    """What came of the drafts of a generation."""

    forwards: int = 0
    """Of each sample, summed over samples."""
    drafted: int = 0
    accepted: int = 0

    def plus(self, other: DraftCounts) -> DraftCounts:
        """The sums of both counts."""
        return DraftCounts(*map(sum, zip(self, other, strict=True)))

    @property
    def tokens_a_forward(self) -> float:
        """Tokens that a sample gets in a forward, in the mean."""
        return 1 + self.accepted / max(1, self.forwards)


class Drafts:
    """The drafts of one generation; where its drafter fails there is one warning, and none of them from then on.

    Args:
        drafter: None: there are no drafts.
        vocabulary: tokens that the model knows; None: all that are guessed.
        costs: of decode steps, as measured; None: proportions by which 64 samples double a step.
    """

    def __init__(
        self, drafter: Drafter | None = None, vocabulary: int | None = None, costs: DecodeCost | None = None
    ) -> None:
        self._drafter = drafter
        self._vocabulary = vocabulary
        self._costs = costs or _PROPORTIONS
        self.counts = DraftCounts()

    def of(self, sample: Running, most: float, live: int) -> list[int]:
        """Guesses of the next tokens of a sample, so many at most, as far as they pay while so many samples live."""
        limit = min(most, MOST)
        if self._drafter is None or limit < 1:
            return []
        try:
            guessed = [int(token) for token in self._drafter.guess(sample, int(limit), self._least(sample, live))]
        except Exception as error:
            self._fails(error)
            return []
        known = self._vocabulary
        odd = (place for place, token in enumerate(guessed) if token < 0 or (known is not None and token >= known))
        return guessed[: min(int(limit), next(odd, len(guessed)))]

    def saw(self, sample: Running, accepted: int) -> None:
        """A sample has got tokens, so many of which were drafted; its last draft is still there."""
        if self._drafter is None:
            return
        forwards, drafted, before = self.counts
        self.counts = DraftCounts(forwards + 1, drafted + len(sample.drafted), before + accepted)
        try:
            self._drafter.saw(sample)
        except Exception as error:
            self._fails(error)

    def _least(self, sample: Running, live: int) -> float:
        """How probable a guess must be to save what it costs: a row now, for one later with its keys and its share of
        a step."""
        row_s, of_step_s = self._costs.row_s, self._costs.step_s / live
        return row_s / max(row_s + of_step_s + self._costs.key_s * sample.length, 1e-300)

    def _fails(self, error: Exception) -> None:
        self._drafter = None
        log.warning("tokens are no longer drafted, as drafting them failed: %s: %s", type(error).__name__, error)
