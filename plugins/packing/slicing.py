"""One rank's sequences into micro-batches of equal cost under a token cap, cutting as few sequences as that takes.

Sequences that cost more than a micro-batch should, or hold more tokens than it may, form a *line*: the longest first,
end to end. All others are spread over the micro-batches whole. Then the line is poured: micro-batch j takes from it
what its own sequences leave of

    target_j = (cost not yet placed) / (micro-batches not yet filled)

and the cut falls where that is reached, in the middle of a sequence at a multiple of ``block`` tokens. Slices are thus
of equal *cost*: late ones, which attend to a long prefix, hold fewer tokens. At most one cut per micro-batch, slices of
a sequence in neighbouring micro-batches, in order. O(K log K + m) for K sequences in m micro-batches.

After SlimPack (arXiv 2509.26246), whose MicroPacks this reconstructs; ChunkFlow (arXiv 2503.02356) cuts equal tokens.
"""

from __future__ import annotations

import math

from ...core.aliases import Ints
from ...core.balance.partition import into_bins
from ...core.balance.slicing import Line
from ...core.costs.costs import PassCost
from ...core.plan.step_plan import Slice

Packs = list[list[Slice]]

EVEN = 0.005
"""Excess over the mean at which a micro-batch counts as even."""


class WorkBudget:
    """Units of work that are left, about a microsecond each: counted, so that all ranks stop at the same place."""

    def __init__(self, units: int) -> None:
        self._left = units

    def spend(self, units: int) -> bool:
        """Take so many; False where no more are left."""
        self._left -= units
        return self._left >= 0


def fill(
    items: list[int],
    lengths: Ints,
    price: PassCost,
    count: int,
    cap: int,
    block: int,
    *,
    even: bool = True,
    work: WorkBudget | None = None,
) -> Packs | None:
    """Micro-batches of the sequences ``items`` (indices into ``lengths``), ``count`` of them or fewer, in launch order.

    ``price`` says what is to be even (launch left out); no micro-batch is over ``cap`` tokens. None if no way was
    found: more micro-batches always help in the end. Without ``even`` only sequences over the cap are cut. ``work`` is
    what may be spent on the search; None is returned where it is used up.
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
        if work and not work.spend(len(items) + 8 * count):
            break
        poured = _pour(line, by_cost[heavy + more :], tokens, cost, price, count, cap, block, work)
        if poured is not None and poured[1] < best_s:
            best, best_s = poured
        if best_s <= target * (1 + EVEN) or heavy + more >= len(items) or not even:
            break
    return best


def _pour(
    line: list[int],
    rest: list[int],
    tokens: dict[int, int],
    cost: dict[int, float],
    price: PassCost,
    count: int,
    cap: int,
    block: int,
    work: WorkBudget | None,
) -> tuple[Packs, float] | None:
    """The micro-batches, and what the costliest of them costs [s]."""
    spread = into_bins([cost[i] for i in rest], [tokens[i] for i in rest], cap, count)
    if spread is None:
        return None
    # The head of a sequence is light: its first micro-batches need the most room for tokens.
    bins = sorted(([rest[k] for k in b] for b in spread), key=lambda b: sum(tokens[i] for i in b))
    rooms = [cap - sum(tokens[i] for i in b) for b in bins]
    own_s = [sum(cost[i] for i in b) for b in bins]
    source = Line(line, tokens, price, block)
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
            if rooms[emptiest] < tokens[moved] or (work and not work.spend(count - j + len(whole))):
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
