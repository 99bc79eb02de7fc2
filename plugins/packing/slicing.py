"""One rank's sequences into micro-batches of equal cost under a token cap, cutting as few sequences as that takes.

Sequences that cost more than a micro-batch should, or hold more tokens than it may, form a *line*: the longest first,
end to end. All others are spread over the micro-batches whole. Then the line is poured: micro-batch j takes from it
what its own sequences leave of

    target_j = (cost not yet placed) / (micro-batches not yet filled)

and the cut falls where that is reached, in the middle of a sequence at a multiple of ``block`` tokens. Slices are thus
of equal *cost*: late ones, which attend to a long prefix, hold fewer tokens. At most one cut per micro-batch, slices of
a sequence in neighbouring micro-batches, in order. With n tokens after a prefix of p costing u n + w n (p + n/2), the
cut solves a quadratic. O(K log K + m) for K sequences in m micro-batches.

After SlimPack (arXiv 2509.26246), whose MicroPacks this reconstructs; ChunkFlow (arXiv 2503.02356) cuts equal tokens.
"""

from __future__ import annotations

import math

from ...core.costs import PassCost
from ...core.partition import Ints, into_bins
from ...core.workload import Slice

Packs = list[list[Slice]]

EVEN = 0.005
"""Excess over the mean at which a micro-batch counts as even."""


def fill(
    items: list[int], lengths: Ints, price: PassCost, count: int, cap: int, block: int, *, even: bool = True
) -> Packs | None:
    """Micro-batches of the sequences ``items`` (indices into ``lengths``), ``count`` of them or fewer, in launch order.

    ``price`` says what is to be even (launch left out); no micro-batch is over ``cap`` tokens. None if no way was
    found: more micro-batches always help in the end. Without ``even`` only sequences over the cap are cut.
    """
    tokens = dict(zip(items, lengths[items].tolist(), strict=True))
    if count == 1:
        return [[Slice(i, 0, n) for i, n in tokens.items()]] if sum(tokens.values()) <= cap else None
    cost = {i: float(price.seconds(n)) for i, n in tokens.items()}
    target = sum(cost.values()) / count
    by_cost = sorted(items, key=lambda i: (-cost[i], i))
    heavy = sum(1 for i in items if tokens[i] > cap or (even and cost[i] > target * (1 + EVEN)))
    best: Packs | None = None
    best_s = math.inf
    # What does not fit whole is cut; then, while it is uneven, ever more of the next largest.
    for more in (0, 1, 2, 4, 8, len(items)):
        line = by_cost[: heavy + more]
        poured = _pour(line, by_cost[heavy + more :], tokens, cost, price, count, cap, block)
        if poured is not None and poured[1] < best_s:
            best, best_s = poured
        if best_s <= target * (1 + EVEN) or heavy + more >= len(items) or not even:
            break
    return best


def pack_seconds(pack: list[Slice], price: PassCost) -> float:
    """What a micro-batch costs [s], launch left out."""
    return float(sum(price.seconds(s.stop - s.start, s.start) for s in pack))


def _pour(
    line: list[int],
    rest: list[int],
    tokens: dict[int, int],
    cost: dict[int, float],
    price: PassCost,
    count: int,
    cap: int,
    block: int,
) -> tuple[Packs, float] | None:
    """The micro-batches, and what the costliest of them costs [s]."""
    spread = into_bins([cost[i] for i in rest], [tokens[i] for i in rest], cap, count)
    if spread is None:
        return None
    # The head of a sequence is light: its first micro-batches need the most room for tokens.
    bins = sorted(([rest[k] for k in b] for b in spread), key=lambda b: sum(tokens[i] for i in b))
    rooms = [cap - sum(tokens[i] for i in b) for b in bins]
    own_s = [sum(cost[i] for i in b) for b in bins]
    source = _Line(line, tokens, price, block)
    left = source.left_s + sum(own_s)
    packs: Packs = []
    worst = 0.0
    for j, whole in enumerate(bins):
        target = left / (count - j)
        pieces, pieces_s = source.take(math.inf if j == count - 1 else target - own_s[j], rooms[j])
        # Short of tokens, not of cost: whole sequences make room for the line and go where there is more of it.
        while whole and j < count - 1 and min(target - own_s[j], source.left_s + pieces_s) - pieces_s > EVEN * target:
            moved = max(whole, key=lambda i: (tokens[i], -i))
            emptiest = max(range(j + 1, count), key=lambda k: rooms[k])
            if rooms[emptiest] < tokens[moved]:
                break
            whole.remove(moved)
            bins[emptiest].append(moved)
            for bin_, sign in ((j, 1), (emptiest, -1)):
                rooms[bin_] += sign * tokens[moved]
                own_s[bin_] -= sign * cost[moved]
            source.give_back(pieces, pieces_s)
            pieces, pieces_s = source.take(target - own_s[j], rooms[j])
        pack = [*pieces, *(Slice(i, 0, tokens[i]) for i in whole)]
        left -= pieces_s + own_s[j]
        worst = max(worst, pieces_s + own_s[j])
        if pack:
            packs.append(pack)
    return None if source.left else (packs, worst)


class _Line:
    """Sequences end to end, consumed from the front."""

    def __init__(self, items: list[int], tokens: dict[int, int], price: PassCost, block: int) -> None:
        self._items, self._tokens, self._price, self._block = items, tokens, price, block
        self._at, self._start = 0, 0
        self.left_s = sum(float(price.seconds(tokens[i])) for i in items)

    @property
    def left(self) -> bool:
        return self._at < len(self._items)

    def take(self, budget_s: float, room: int) -> tuple[list[Slice], float]:
        """The next slices that cost about ``budget_s`` and hold at most ``room`` tokens, and what they do cost."""
        pieces: list[Slice] = []
        spent_s = 0.0
        while self.left:
            item, start = self._items[self._at], self._start
            rest = self._tokens[item] - start
            take = self._cut(start, rest, min(self._price.tokens_within(start, budget_s - spent_s), room), room)
            if take:
                pieces.append(Slice(item, start, start + take))
                spent_s += float(self._price.seconds(take, start))
                room -= take
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

    def _cut(self, start: int, rest: int, wanted: float, room: int) -> int:
        """Tokens to take of ``rest``: about ``wanted``, so that no slice is shorter than a block."""
        if wanted >= rest - self._block / 2 and rest <= room:
            return rest
        end = round((start + wanted) / self._block) * self._block
        while end - start > room or start + rest - end < min(self._block, rest):
            end -= self._block
        return max(0, end - start)
