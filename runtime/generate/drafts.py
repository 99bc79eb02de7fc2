"""Drafts: guesses of a sample's next tokens, which one forward checks together.

    d_1 .. d_k    guesses; the forward computes the last token of the sample and these
    p_0 .. p_k    what is picked after each, by the rule and the noise of its place
    next tokens   p_0 .. p_a, where d_1 .. d_a are those guesses that equal p_0 .. p_(a-1) up to the first that does not

A guess is never taken for its own probability: what comes out are picks, and each is made after the tokens that stand
before it. So a draft changes when a token is computed, not which it is. Keys of guesses that were wrong lie after the
end of the sample, where nobody sees them, and are written over.

A guess costs a row of its forward, and saves with probability V, that it and those before it are right, a row of a
later one and its share of the step:

    V > c / (c + s step_s / live samples),   c = row_s + key_s K   where it sees K keys

or it is left out. Where samples wait for slots, s is 1; else it is 1/2, as the sample that ends last decides how many
steps there are, and is harder to foresee than others. V falls from guess to guess, so those of a sample are taken up to
the first that does not pay: of all live samples the same ones as if all were ranked by V.

Whether that saves what it costs to ask, too, and to attend to rows of unlike lengths, is seen by what came of it. Where
it falls short by over 1 % of a step, nobody is asked for 8 forwards, then 16 and 32, until 4 forwards of a probe, or
fewer live samples, say otherwise. Counts decide, never clocks: ranks that hold a model together agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...core.costs.decode import DecodeCost
from ..attention.decode_rows import MOST_TOKENS
from .request import Drafter, DraftModel, ModelDrafter
from .schedule import Running

log = logging.getLogger("evenload")

_STEP_S = 1e-2
_PROPORTIONS = DecodeCost(step_s=_STEP_S, row_s=_STEP_S / 64, key_s=0.0, prompt_s=0.0)
_ASK_S = 1e-5
"""Of a guess by texts, measured on a CPU."""
_SECOND_CALL = 1 / 8
"""Of a step, where rows of unlike lengths attend in calls of their own: 0.04 to 0.09 measured with few keys."""
_FIRST, _PROBE, _REST, _LONGEST_REST = 16, 4, 8, 32
"""Forwards that are drafted before anything is known, that a probe takes, and from one to the next."""
_LATE = 0.5
"""Share of steps that drafts save where no sample takes the place of one that ends."""
_SEEN = 16
"""Tokens of a sample after which a drafter sees it while it is not asked."""
_SLACK = 0.01
"""Of a step, by which drafts may fall short: what is known of them is never sure."""
_FADES, _MANY = 0.05, 16
"""What counts lose from one forward to the next, where so many samples or more were asked for."""
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
        costs: of decode steps, as measured; None: proportions by which 64 samples double a step of 10 ms.
    """

    def __init__(
        self, drafter: Drafter | None = None, vocabulary: int | None = None, costs: DecodeCost | None = None
    ) -> None:
        self._drafter = drafter
        self._vocabulary = vocabulary
        self._costs = costs or _PROPORTIONS
        self._step_s = self._costs.step_s
        """Of a step, what a token saves a share of."""
        self._counts = [0, 0, 0]
        self._begun = [0, 0, 0]
        """Samples that were asked for, what was drafted of them and what was right, when the last forward began."""
        self._asked = 0
        self._recent = [0.0, 0.0, 0.0]
        """Of the forwards that have asked, those of long ago less."""
        self._asks = drafter is not None
        """Whether samples are asked for."""
        self._left = _FIRST + 1
        """Forwards until that is decided again."""
        self._rest = _REST
        """For so many they are not, when it has not paid."""

    @property
    def counts(self) -> DraftCounts:
        """What came of all drafts so far."""
        return DraftCounts(*self._counts)

    def begin(self, live: Sequence[Running], *, waiting: bool) -> None:
        """A forward begins, while these samples live, and others may wait; it is decided whether it drafts. Who guesses
        by the model itself decides that by itself."""
        if self._drafter is None or isinstance(self._drafter, ModelDrafter):
            return
        self._step_s = self._costs.step_s * (1 if waiting or len(live) == 1 else _LATE)
        now = [self._asked, *self._counts[1:]]
        if asked := now[0] - self._begun[0]:
            kept = 1 - _FADES * min(1, asked / _MANY)
            rows = zip(self._recent, now, self._begun, strict=True)
            self._recent = [kept * recent + new - old for recent, new, old in rows]
            self._begun = now
        self._left -= 1
        pays = (self._left <= 0 or not self._asks) and self._pays(live)
        if pays:
            self._asks = True
            self._rest = _REST
        elif self._left <= 0 and self._asks:
            self._asks = False
            self._left = self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
        elif self._left <= 0:
            self._asks = True
            self._left = _PROBE
            self._recent = [one / 4 for one in self._recent]

    def of(self, sample: Running, most: float, live: int) -> list[int]:
        """Guesses of the next tokens of a sample, so many at most, as far as they pay while so many samples live."""
        limit = min(most, MOST)
        if self._drafter is None or not self._asks or limit < 1:
            return []
        self._asked += 1
        try:
            guessed = [int(token) for token in self._drafter.guess(sample, int(limit), self._least(sample, live))]
        except Exception as error:
            self._fails(error)
            return []
        known = self._vocabulary
        odd = (place for place, token in enumerate(guessed) if token < 0 or (known is not None and token >= known))
        return guessed[: min(int(limit), next(odd, len(guessed)))]

    def ahead(
        self, samples: Sequence[Running], fitting: Callable[[Running, int], int], model: DraftModel | None
    ) -> None:
        """Let a drafter guess for all samples that are asked for next, if it does so by the model itself. Where it
        fails on one of the ranks that hold the model together, so does the generation: the others wait for it."""
        if not isinstance(self._drafter, ModelDrafter) or model is None or not samples:
            return
        try:
            self._drafter.ahead(samples, fitting, model)
        except Exception as error:
            if not model.alone:
                raise
            self._fails(error)

    def took(self, seconds: float) -> None:
        """A forward that computed nothing but samples and their guesses has taken so long."""
        if isinstance(self._drafter, ModelDrafter):
            self._drafter.took(seconds)

    def saw(self, sample: Running, accepted: int) -> None:
        """A sample has got tokens, so many of which were drafted; its last draft is still there."""
        if self._drafter is None:
            return
        counts = self._counts
        counts[0] += 1
        counts[1] += len(sample.drafted)
        counts[2] += accepted
        if not self._asks and len(sample.new) % _SEEN:
            return
        try:
            self._drafter.saw(sample)
        except Exception as error:
            self._fails(error)

    def _pays(self, live: Sequence[Running]) -> bool:
        """Whether asking for these samples saves what it costs, by what was right of late."""
        asked, drafted, right = (one / max(1.0, self._recent[0]) for one in self._recent)
        count, rows_s = len(live), sum(map(self._row_s, live))
        apart_s = min(1, drafted * count) * (count > 1) * _SECOND_CALL * self._costs.step_s
        return (right + _SLACK) * (rows_s + self._step_s) >= count * asked * _ASK_S + drafted * rows_s + apart_s

    def _least(self, sample: Running, live: int) -> float:
        """How probable a guess must be to save what it costs."""
        row_s = self._row_s(sample)
        return row_s / max(row_s + self._step_s / live, 1e-300)

    def _row_s(self, sample: Running) -> float:
        return self._costs.row_s + self._costs.key_s * sample.length

    def _fails(self, error: Exception) -> None:
        self._drafter = None
        log.warning("tokens are no longer drafted, as drafting them failed: %s: %s", type(error).__name__, error)
