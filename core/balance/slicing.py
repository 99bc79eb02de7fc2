"""Where sequences are cut: slices of equal cost, at multiples of a block, under a token cap.

Late slices of equal cost hold fewer tokens; where a cost is reached says `PassCost.tokens_within`. Plans of every kind
cut here.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..aliases import Ints
from ..costs.costs import PassCost
from ..plan.step_plan import Slice
from .partition import best_fit_decreasing


def cut(start: int, rest: int, wanted: float, most: int, block: int) -> int:
    """Tokens to take of the ``rest`` after ``start``: about ``wanted``, at most ``most``, no slice below a block.

    All lengths in tokens. 0 where that cannot be.
    """
    if wanted >= rest - block / 2 and rest <= most:
        return rest
    end = round((start + wanted) / block) * block
    while end - start > most or start + rest - end < min(block, rest):
        end -= block
    return max(0, end - start)


def in_chunks(items: Iterable[int], lengths: Ints, chunk: int, cap: int) -> list[list[Slice]]:
    """Micro-batches of sequences: those over ``cap`` tokens in chunks of ``chunk``, one each, the others best-fit."""
    tokens = {i: int(lengths[i]) for i in items}
    chunks = ((i, start, n) for i, n in tokens.items() if n > cap for start in range(0, n, chunk))
    packs = [[Slice(i, start, min(start + chunk, n))] for i, start, n in chunks]
    short = best_fit_decreasing(lengths, cap, (i for i, n in tokens.items() if n <= cap))
    return packs + [[Slice(i, 0, tokens[i]) for i in pack] for pack in short]


def evenly(sequence: int, length: int, count: int, price: PassCost, cap: int, block: int) -> list[Slice]:
    """A sequence of ``length`` tokens in ``count`` slices of equal cost, in more where the token cap demands it.

    ``cap`` is at least ``block``. The last slice may be shorter than a block where that is the only way.
    """
    slices: list[Slice] = []
    start = 0
    while start < length:
        rest = length - start
        left_s = float(price.seconds(rest, start))
        wanted = min(price.tokens_within(start, left_s / max(1, count - len(slices))), cap)
        taken = cut(start, rest, wanted, cap, block) or min(rest, cap // block * block)
        slices.append(Slice(sequence, start, start + taken))
        start += taken
    return slices


class Line:
    """Sequences end to end, consumed from the front."""

    def __init__(self, items: list[int], tokens: dict[int, int], price: PassCost, block: int) -> None:
        self._items = items
        self._tokens = tokens
        self._price = price
        self._block = block
        self._at, self._start = 0, 0
        self.left_s = sum(float(price.seconds(tokens[i])) for i in items)

    @property
    def left(self) -> bool:
        return self._at < len(self._items)

    def take(self, budget_s: float, most: int) -> tuple[list[Slice], float]:
        """The next slices that cost about ``budget_s`` and hold at most ``most`` tokens, and what they do cost."""
        pieces: list[Slice] = []
        spent_s = 0.0
        while self.left:
            item, start = self._items[self._at], self._start
            rest = self._tokens[item] - start
            wanted = min(self._price.tokens_within(start, budget_s - spent_s), most)
            take = cut(start, rest, wanted, most, self._block)
            if take:
                pieces.append(Slice(item, start, start + take))
                spent_s += float(self._price.seconds(take, start))
                most -= take
            if take < rest:
                self._start = start + take
                break
            self._at, self._start = self._at + 1, 0
        self.left_s -= spent_s
        return pieces, spent_s

    def give_back(self, pieces: list[Slice], spent_s: float) -> None:
        """Undo the `take` that gave these."""
        self.left_s += spent_s
        for piece in reversed(pieces):
            ended = piece.stop == self._tokens[piece.sequence]
            self._at, self._start = self._at - ended, piece.start
