"""Guesses of the next tokens of a sample by its text at earlier weights, and by what followed the same tokens before.

Noise is a hash of sample and place, so a sample of weights that have moved little says nearly what it said: as long as
its last tokens are those of its earlier text at this very place, that text is the guess. Else the longest of its last
12, 8, 5, 3 tokens that were there before is looked up: in the sample itself and in its earlier text, then in the
prompt, in other samples of it, and in their earlier texts, the newest first. What stands there next is the guess.

O(1) for each token that is seen, and for each guess besides its length. A pure function of the tokens it was shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...core.recipe.generated import DraftRule
    from ...runtime.generate.request import Completion, MakeDrafter, Request, UnfinishedSample

_ORDERS = 12, 8, 5, 3
"""Tokens that are looked up, the longest first."""
_LEAST = min(_ORDERS)
_MOST = 1 << 17
"""Tokens of all prompts that are looked up in; beyond, what was not used for longest is forgotten."""
_MOST_AT_ONCE = 2048
"""Tokens of a prompt, or of a sample that has come from elsewhere, that are looked up in: its last ones."""


class _Texts:
    """What is known of one prompt: where its tokens, and those of its samples, have stood."""

    def __init__(self, request: Request) -> None:
        self._prompt = list(request.tokens[-_MOST_AT_ONCE:])
        self._live: dict[int, tuple[list[int], int]] = {}
        """By number, the text of a sample, and the place in it of its first new token."""
        self._after: dict[int, tuple[list[int], int]] = {}
        """By the hash of tokens, of all or of one sample: the text where they stood last, and the place after them."""
        self.size = 0
        self._add(self._prompt, 0, None)

    def add(self, number: int, tokens: Sequence[int]) -> None:
        """What a sample once said."""
        begin = self._begin()
        self._add([*begin, *tokens], len(begin), number)

    def grown(self, sample: UnfinishedSample) -> list[int]:
        """The text of a sample, with the end of its prompt, as far as it has come."""
        if sample.number not in self._live:
            unseen = max(0, len(sample.new) - _MOST_AT_ONCE)
            self._live[sample.number] = ([], -unseen) if unseen else (self._begin(), len(self._begin()))
        text, begin = self._live[sample.number]
        first = len(text)
        text += sample.new[first - begin :]
        self._add(text, first, sample.number)
        return text

    def guess(self, text: list[int], number: int, most: int) -> list[int]:
        """What comes after a text."""
        for order in _ORDERS[sum(order > len(text) for order in _ORDERS) :]:
            last = tuple(text[-order:])
            stood = self._after.get(hash((number, last))) or self._after.get(hash(last))
            if stood is not None:
                known, place = stood
                guessed = known[place : place + most]
                while known is text and len(guessed) < most:  # what repeats itself goes on to
                    guessed += guessed[: most - len(guessed)]
                return guessed
        return []

    def _begin(self) -> list[int]:
        return self._prompt[-max(_ORDERS) :]

    def _add(self, text: list[int], first: int, number: int | None) -> None:
        """The tokens of a text from ``first`` on."""
        self.size += len(text) - first
        for place in range(max(first, _LEAST), len(text)):
            for order in _ORDERS:
                if order <= place:
                    last = tuple(text[place - order : place])
                    self._after[hash(last)] = self._after[hash((number, last))] = text, place


class TextDrafter:
    """Guesses by texts.

    Args:
        most: tokens of a guess.
        earlier: samples of the same prompts, by their numbers; of one that is there twice the last one is its own.
    """

    def __init__(self, most: int, earlier: Sequence[Completion]) -> None:
        self._most = most
        self._earlier: defaultdict[int, list[Completion]] = defaultdict(list)
        for sample in earlier:
            self._earlier[sample.prompt].append(sample)
        self._own = {sample[:2]: list(sample.tokens) for sample in earlier}
        self._texts: dict[int, _Texts] = {}
        """By the number of a prompt, the one used last at the end."""

    def guess(self, sample: UnfinishedSample, most: int) -> list[int]:
        """Guess in the form that `Drafter.guess` has."""
        most, done = min(most, self._most), len(sample.new)
        own = self._own.get((sample.request.number, sample.number), [])
        if done < len(own) and own[max(0, done - _LEAST) : done] == sample.new[-_LEAST:]:
            return own[done : done + most]
        texts = self._of(sample.request)
        return texts.guess(texts.grown(sample), sample.number, most)

    def saw(self, sample: UnfinishedSample) -> None:
        """Remember what a sample has said since it was seen."""
        self._of(sample.request).grown(sample)

    def _of(self, request: Request) -> _Texts:
        texts = self._texts.pop(request.number, None)
        if texts is None or texts.size > _MOST:
            texts, known = _Texts(request), self._earlier[request.number]
            sizes = accumulate(len(sample.tokens) for sample in reversed(known))
            fitting = sum(size < _MOST // 2 for size in sizes)
            for sample in known[len(known) - fitting :]:
                texts.add(sample.sample, sample.tokens)
        self._texts[request.number] = texts
        while len(self._texts) > 1 and sum(one.size for one in self._texts.values()) > _MOST:
            del self._texts[next(iter(self._texts))]
        return texts


def drafter(rule: DraftRule) -> MakeDrafter:
    """The drafter of `generate.drafts.by: texts`."""
    return partial(TextDrafter, rule.most)
