"""Guesses of the next tokens of a sample by its text at earlier weights, and by what followed the same tokens before.

Noise is a hash of sample and place, so a sample of weights that have moved little says nearly what it said: as long as
its last tokens are those of its earlier text at this very place, that text is the guess. Else the places are looked up
where its last three tokens stood before: in prompts, in samples, and in earlier samples of these prompts, all of one
tenant. Of the newest 16 the one after the most equal tokens counts, and what stands there next is the guess.

How many: text is unevenly predictable (HeteroSpec, arXiv 2505.13254), so guesses are counted by kinds, which are those
of a sample's own text and 30 others: by the equal tokens before a guess, and by the share of the places where the same
follows. As much is given as is all right with the probability that is asked for, by the share of each kind that was
right so far. The paper's regression tree of the entropy would foresee less: see docs/log.md.

O(1) for each token that is seen, and for each guess: about 10 us a token in all. A pure function of the tokens it was
shown.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...core.recipe.generated import DraftRule
    from ...runtime.generate.request import Completion, MakeDrafter, Request, UnfinishedSample

_LEAST, _LONGEST = 3, 16
"""Equal tokens after which a guess is made, and more than which are not told apart."""
_PLACES = 16
"""From which a guess is chosen."""
_MOST = 1 << 17
"""Tokens that are looked up in; beyond, the oldest half is forgotten."""
_MOST_AT_ONCE = 2048
"""Tokens of a prompt, or of a sample that has come from elsewhere, that are looked up in: its last ones."""

_Kind = tuple[int, int]
_OWN: _Kind = -1, -1
"""Of guesses by a sample's own earlier text; others are of the classes that these borders part."""
_EQUAL = 4, 6, 9, 12, 16
"""Equal tokens before a guess."""
_AGREEING = 0.2, 0.5, 0.8, 0.92
"""Share of the places, of those where all was the same so far, after which the same token stood."""
_Guess = list[tuple[int, _Kind]]


class _Texts:
    """Where tokens stood before: chains of places after the same few, the newest first (as in LZ77)."""

    def __init__(self) -> None:
        self._young: dict[int, tuple[list[int], int, Any]] = {}
        """By the hash of tokens: the text where they stood last, the place after them, and where they stood before."""
        self._old: dict[int, tuple[list[int], int, Any]] = {}
        self._size = 0
        """Tokens of the young ones."""

    def add(self, text: list[int], first: int, tenant: int | None) -> bool:
        """The tokens of a text from ``first`` on; whether others were forgotten for them."""
        young = self._young
        for place in range(max(first, _LEAST), len(text)):
            last = hash((tenant, *text[place - _LEAST : place]))
            young[last] = text, place, young.get(last)
        self._size += len(text) - first
        full = self._size > _MOST // 2
        if full:
            self._old = young
            self._young = {}
            self._size = 0
        return full

    def places(self, text: list[int], tenant: int | None) -> list[tuple[int, list[int], int]]:
        """Where the last tokens of a text stood, the newest first: how many are equal, the text, and the place after
        them."""
        last = hash((tenant, *text[-_LEAST:]))
        stood_at: list[tuple[int, list[int], int]] = []
        for stood in (self._young.get(last), self._old.get(last)):
            while stood and len(stood_at) < _PLACES:
                known, place, stood = stood
                equal, most = 0, min(_LONGEST, place, len(text))
                while equal < most and known[place - 1 - equal] == text[-1 - equal]:
                    equal += 1
                if equal >= _LEAST:  # or another one has this hash
                    stood_at.append((equal, known, place))
        return stood_at


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
        self._texts = _Texts()
        self._begins: dict[int, list[int]] = {}
        """By the number of a prompt its last tokens."""
        self._live: dict[tuple[int, int], tuple[list[int], int]] = {}
        """The text of each sample that is looked up in, and the place in it of the sample's first token."""
        self._rates: defaultdict[_Kind, list[int]] = defaultdict(lambda: [4, 5])
        """Guesses of each kind that were right, and all whose predecessors were; as if there had been 5 before."""
        self._open: dict[tuple[int, int], tuple[int, _Guess]] = {}
        """Guesses of samples that are being computed, and how many tokens were before them."""

    def guess(self, sample: UnfinishedSample, most: int, least: float) -> list[int]:
        """Guess in the form that `Drafter.guess` has."""
        key, done, most = (sample.request.number, sample.number), len(sample.new), min(most, self._most)
        own = self._own.get(key, ())
        if done < len(own) and own[max(0, done - _LEAST) : done] == sample.new[-_LEAST:]:
            guessed = self._as_far_as([(token, _OWN) for token in own[done : done + most]], least)
        else:
            text = self._grown(sample)
            guessed = self._as_far_as(_looked_up(self._texts.places(text, sample.request.tenant), text, most), least)
        if guessed:
            self._open[key] = done, guessed
        return [token for token, _ in guessed]

    def saw(self, sample: UnfinishedSample) -> None:
        """Remember what a sample has said since it was seen, and how much of its guess was right."""
        self._grown(sample)
        done, guessed = self._open.pop((sample.request.number, sample.number), (0, ()))
        for (guess, kind), token in zip(guessed, sample.new[done:], strict=False):
            rate = self._rates[kind]
            rate[0] += guess == token
            rate[1] += 1
            if guess != token:
                break

    def _as_far_as(self, guesses: Iterable[tuple[int, _Kind]], least: float) -> _Guess:
        """Guesses up to the first with which it is less probable that all are right."""
        chance, taken = 1.0, []
        for token, kind in guesses:
            right, of = self._rates[kind]
            chance *= right / of
            if chance < least:
                break
            taken.append((token, kind))
        return taken

    def _grown(self, sample: UnfinishedSample) -> list[int]:
        """The text of a sample, with the end of its prompt, as far as it has come; it is looked up in from then on."""
        key = sample.request.number, sample.number
        if key not in self._live:
            unseen, prompt = max(0, len(sample.new) - _MOST_AT_ONCE), self._begin(sample.request)
            self._live[key] = ([], -unseen) if unseen else ([*prompt], len(prompt))
        text, begin = self._live[key]
        first = len(text)
        text += sample.new[first - begin :]
        self._add(text, first, sample.request.tenant)
        return text

    def _begin(self, request: Request) -> list[int]:
        """The last tokens of a prompt, which is looked up in from then on, and earlier samples of it."""
        begin = self._begins.get(request.number)
        if begin is None:
            prompt = [*request.tokens[-_MOST_AT_ONCE:]]
            begin = self._begins[request.number] = prompt[-_LONGEST:]
            self._add(prompt, 0, request.tenant)
            known = self._earlier[request.number]
            sizes = accumulate(len(sample.tokens) for sample in reversed(known))
            for sample in known[len(known) - sum(size < _MOST // 8 for size in sizes) :]:
                self._add([*begin, *sample.tokens], len(begin), request.tenant)
        return begin

    def _add(self, text: list[int], first: int, tenant: int | None) -> None:
        if self._texts.add(text, first, tenant):
            self._live.clear()


def _looked_up(places: Sequence[tuple[int, list[int], int]], text: list[int], most: int) -> Iterator[tuple[int, _Kind]]:
    """What stands at the first of the places after the most equal tokens, and at those after it, each with its kind."""
    equal, known, place = max(places, key=itemgetter(0), default=(0, text, len(text)))
    of_equal = bisect(_EQUAL, equal)
    guessed: list[int] = []
    while len(guessed) < most and (place < len(known) or (guessed and known is text)):
        if place == len(known):  # what repeats itself goes on to
            known, place = guessed, 0
        token = known[place]
        same = [(equal, other, at + 1) for equal, other, at in places if at < len(other) and other[at] == token]
        yield token, (of_equal, bisect(_AGREEING, (len(same) + 0.5) / (len(places) + 1)))
        guessed.append(token)
        places, place = same, place + 1


def drafter(rule: DraftRule) -> MakeDrafter:
    """The drafter of `generate.drafts.by: texts`."""
    return partial(TextDrafter, rule.most)
