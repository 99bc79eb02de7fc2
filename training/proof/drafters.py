"""Drafters of a proof: one that guesses at random, and one that is right for a while and then wrong on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...runtime.generate.request import UnfinishedSample


class Guessing:
    """Guesses tokens at random, as many as it is asked for, or fewer.

    Args:
        vocabulary: tokens that it draws from.
        texts: samples by prompt and number, which it tells up to a token that it draws, and from there on again; what
            it does not know of them, or without any, it draws.
    """

    def __init__(self, vocabulary: int, texts: Mapping[tuple[int, int], Sequence[int]] | None = None) -> None:
        self._vocabulary, self._texts = vocabulary, texts or {}

    def guess(self, sample: UnfinishedSample, most: int, least: float) -> list[int]:
        """Guess in the form that `Drafter.guess` has."""
        key, done = (sample.request.number, sample.number), len(sample.new)
        drawn = np.random.default_rng([*key, done])
        guessed: list[int] = drawn.integers(self._vocabulary, size=drawn.integers(most + 1)).tolist()
        wrong = int(drawn.integers(most + 1))
        for place, token in enumerate(self._texts.get(key, ())[done : done + len(guessed)]):
            if place != wrong:
                guessed[place] = token
        return guessed

    def saw(self, sample: UnfinishedSample) -> None:
        """What it knows does not grow."""
