"""Guesses of the next tokens of a sample by its text at earlier weights, and by what followed the same tokens before.

Noise is a hash of sample and place, so a sample of weights that have moved little says nearly what it said: as long as
its last tokens are those of its earlier text at this very place, that text is the guess. Else the longest of its last
12, 8, 5, 3 tokens that were there before is looked up: in the sample itself and in its earlier text, then in the
prompt, in other samples of it, and in their earlier texts, the newest first. What stands there next is the guess.

Of a guess as much is given as is all right with the probability that is asked for: by the share of guesses that were
right so far after as many equal tokens, or at the sample's own place.

O(1) for each token that is seen, and for each guess besides its length. A pure function of the tokens it was shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, repeat
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...core.recipe.generated import DraftRule
    from ...runtime.generate.request import Completion, MakeDrafter, Request, UnfinishedSample

_ORDERS = 12, 8, 5, 3
"""Tokens that are looked up, the longest first."""
_LEAST = min(_ORDERS)
_ODD = 0x9E3779B97F4A
_MOST = 1 << 17
"""Tokens of all prompts that are looked up in; beyond, what was not used for longest is forgotten."""
_MOST_AT_ONCE = 2048
"""Tokens of a prompt, or of a sample that has come from elsewhere, that are looked up in: its last ones."""


def _own(number: int) -> int:
    """What tells hashes of a sample's tokens from those of all."""
    return (number + 1) * _ODD


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

    def guess(self, text: list[int], number: int, most: int, orders: Iterable[int]) -> tuple[list[int], int]:
        """What comes after a text, and after how many equal tokens it stood, of these numbers."""
        if hash(tuple(text[-_LEAST:])) not in self._after:
            return [], 0  # nor has more of it stood there
        for order in orders:
            last = hash(tuple(text[-order:]))
            stood = self._after.get(last ^ _own(number)) or self._after.get(last)
            if stood is not None:
                known, place = stood
                guessed = known[place : place + most]
                while known is text and len(guessed) < most:  # what repeats itself goes on to
                    guessed += guessed[: most - len(guessed)]
                return guessed, order
        return [], 0

    def _begin(self) -> list[int]:
        return self._prompt[-max(_ORDERS) :]

    def _add(self, text: list[int], first: int, number: int | None) -> None:
        """The tokens of a text from ``first`` on."""
        self.size += len(text) - first
        after, own = self._after, 0 if number is None else _own(number)
        for place in range(max(first, _LEAST), len(text)):
            stood = text, place
            for order in _ORDERS:
                if order <= place:
                    last = hash(tuple(text[place - order : place]))
                    after[last] = after[last ^ own] = stood


@dataclass
class _Rate:
    """How often guesses of a kind are right where those before them were; often, as long as little is known."""

    right: float = 4.0
    of: float = 5.0

    def add(self, right: bool) -> None:
        self.right += right
        self.of += 1

    @property
    def share(self) -> float:
        return self.right / self.of

    def depth(self, least: float, most: int) -> int:
        """Guesses, ``most`` at most, that are all right with so much probability at least."""
        return sum(chance >= least for chance in accumulate(repeat(self.share, most), mul))


_NOTHING: tuple[int, int, list[int]] = 0, 0, []


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
        self._size = 0
        self._rates = {order: _Rate() for order in (0, *_ORDERS)}
        """By the equal tokens before a guess; 0: of a sample's own earlier text."""
        self._open: dict[tuple[int, int], tuple[int, int, list[int]]] = {}
        """Guesses of samples that are being computed: the rate they count for, the tokens before, and the guess."""

    def guess(self, sample: UnfinishedSample, most: int, least: float) -> list[int]:
        """Guess in the form that `Drafter.guess` has."""
        key, done = (sample.request.number, sample.number), len(sample.new)
        own, most, order = self._own.get(key, []), min(most, self._most), 0
        if done < len(own) and own[max(0, done - _LEAST) : done] == sample.new[-_LEAST:]:
            guessed = own[done : done + most]
        else:
            texts, text = self._grown(sample)
            orders = [one for one in _ORDERS if one <= len(text) and self._rates[one].share >= least]
            guessed, order = texts.guess(text, sample.number, most, orders)
        if guessed:
            guessed = guessed[: self._rates[order].depth(least, most)]
            self._open[key] = order, done, guessed
        return guessed

    def saw(self, sample: UnfinishedSample) -> None:
        """Remember what a sample has said since it was seen, and how much of its guess was right."""
        self._grown(sample)
        order, done, guessed = self._open.pop((sample.request.number, sample.number), _NOTHING)
        for guess, token in zip(guessed, sample.new[done:], strict=False):
            self._rates[order].add(guess == token)
            if guess != token:
                break

    def _grown(self, sample: UnfinishedSample) -> tuple[_Texts, list[int]]:
        """What is known of a prompt, and the text of its sample as far as it has come."""
        texts = self._of(sample.request)
        before = texts.size
        text = texts.grown(sample)
        self._size += texts.size - before
        return texts, text

    def _of(self, request: Request) -> _Texts:
        texts = self._texts.pop(request.number, None)
        if texts is None or texts.size > _MOST:
            self._size -= texts.size if texts else 0
            texts, known = _Texts(request), self._earlier[request.number]
            sizes = accumulate(len(sample.tokens) for sample in reversed(known))
            fitting = sum(size < _MOST // 2 for size in sizes)
            for sample in known[len(known) - fitting :]:
                texts.add(sample.sample, sample.tokens)
            self._size += texts.size
        self._texts[request.number] = texts
        while len(self._texts) > 1 and self._size > _MOST:
            self._size -= self._texts.pop(next(iter(self._texts))).size
        return texts


def drafter(rule: DraftRule) -> MakeDrafter:
    """The drafter of `generate.drafts.by: texts`."""
    return partial(TextDrafter, rule.most)
