"""Long sequences in time and space at once: chains of slices, each slice on the same ranks; short ones fill the gaps.

A sequence is cut where its ranks cannot hold it (the token cap), or where a pipeline wants smaller micro-batches than
its ranks make of it. A plan is a row of *blocks*; a block is K rounds that run forward in order and then backward in
reverse, and each rank runs one micro-batch a round:

    round 1   [ A0   A0   A0 | B0 | ....  ]        A: 3 slices on three ranks, B: 2 slices on one,
    round 2   [ A1   A1   A1 | B1 | ....  ]        ....: whole sequences that fit into a cell
    round 3   [ A2   A2   A2 | .. | ....  ]

Slices of a chain cost alike, so that rounds do; chains are placed longest first on neighbouring ranks of the first
block with room, whole sequences on the emptiest cells. No published system chooses between the two axes for each
sequence; here every degree is tried for the long ones, in pipelines also degrees of their own, so that what is shorter
than a mean rank's work is not shared, and the simulator judges.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ....core.aliases import Ints
from ....core.balance.slicing import evenly
from ....core.costs.attention_comm import SharedLoad, load_of
from ....core.costs.context import Direction
from ....core.costs.costs import PassCost
from ....core.costs.exposed import attention_s
from ....core.plan.limits import Limits
from ....core.plan.step_plan import MicroBatch, Slice
from ..cost_table import LEAST_TOKENS, CostTable, CpStrategy
from ..emit.blocks import Block

_SHORTER = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Times of a round over the longest that the token cap allows, where stages wait for each other."""
_OWN = 0
"""Instead of a degree: each sequence on as few ranks as take no longer than the mean of all ranks."""
_FULL = 1.02
"""Time of a cell over the round's from which it takes no further sequence."""
_SLICES = 1 << 15
"""Slices and whole sequences of all divisions together after which none into more is begun."""
_TRIES = 16
"""Numbers of slices of equal cost that are tried, from the fewest that might keep the cap on."""


class Chain(NamedTuple):
    """A sequence that is cut."""

    slices: tuple[Slice, ...]
    degree: int

    def of(self, sequence: int) -> Chain:
        """The chain of another sequence of the same length."""
        return self._replace(slices=tuple(s._replace(sequence=sequence) for s in self.slices))


def chained(
    lengths: Ints, cost_table: CostTable, limits: Limits, notes: list[str] | None = None
) -> Iterator[list[Block]]:
    """The batch divided into blocks, one division for each degree and length of a round; lengths int64 [K].

    Divisions into few slices come first; once `_SLICES` were made, those into more are left out, and ``notes`` says so.
    """
    costs, stages = cost_table.context.costs, limits.num_stages
    price = costs.forward.plus(costs.backward)
    seconds = costs.sequence_s(lengths)
    mean_s = float(seconds.sum()) / limits.num_ranks
    whole_s = min(mean_s, float(price.seconds(limits.max_tokens)))
    longest_first = np.argsort(-lengths, kind="stable").tolist()
    too_long = set(np.flatnonzero(lengths > limits.max_tokens).tolist())

    def slices_of(round_s: float, degree: int) -> int:
        cut = (lengths > limits.max_tokens) | (seconds > _FULL * round_s)
        by_time = seconds[cut] / max(round_s, 1e-300) if round_s else lengths[cut]
        by_cap = lengths[cut] / limits.max_tokens
        slices = np.maximum(np.minimum(by_time, lengths[cut] / LEAST_TOKENS), by_cap).sum()
        return int(slices / max(1, degree)) + len(lengths)

    tried_degrees = [*_powers(cost_table.usable), *([_OWN] if stages > 1 and seconds.max(initial=0.0) > mean_s else [])]
    forms = [(s * whole_s, d) for s in (_SHORTER if stages > 1 else _SHORTER[:1]) for d in tried_degrees]
    spent = 0
    for round_s, degree in sorted(forms, key=lambda form: slices_of(*form)):
        if spent and spent + slices_of(round_s, degree) > _SLICES:
            if notes is not None:
                notes.append("mesh: a large batch in slices: divisions into more of them were not tried")
            return
        spent += slices_of(round_s, degree)
        chain_of = cache(partial(_chain, round_s=round_s, cost_table=cost_table, limits=limits))
        cut = [i for i in longest_first if i in too_long or seconds[i] > _FULL * round_s]
        degrees = [degree if degree != _OWN else math.ceil(seconds[i] / mean_s) for i in cut]
        tried = ((i, chain_of(int(lengths[i]), degree=d)) for i, d in zip(cut, degrees, strict=True))
        cuts = [chain.of(i) for i, chain in tried if chain is not None]
        named = {chain.slices[0].sequence for chain in cuts}
        if not named >= too_long:
            continue  # one of them has too few tokens for so many ranks
        rest = [i for i in longest_first if i not in named]
        yield _blocks(cuts, rest, lengths, round_s, price, limits, cost_table)


def _powers(degrees: list[int]) -> list[int]:
    """Powers of two and the largest: enough, since the simulator judges each."""
    return [d for d in degrees if d & (d - 1) == 0 or d == degrees[-1]]


def _chain(length: int, *, degree: int, round_s: float, cost_table: CostTable, limits: Limits) -> Chain | None:
    """Sequence 0, of ``length`` tokens, on ``degree`` ranks, or on as many as its tokens are enough for. None where the
    cap is too small."""
    costs = cost_table.context.costs
    price = costs.forward.plus(costs.backward)
    ranks = max((d for d in cost_table.usable if d <= degree and LEAST_TOKENS * d <= length), default=1)
    least = LEAST_TOKENS * ranks
    most = ranks * (limits.max_tokens - 2) if ranks > 1 else limits.max_tokens
    each = float(price.seconds(length)) / ranks
    wanted = min(round(each / round_s) if round_s else 1, length // least)
    count = max(1, wanted, -(-length // (ranks * limits.max_tokens)))
    for more in range(_TRIES):
        first, last = _ends(length, count + more, price)
        if first > most + 1 or last < least - 1:
            continue
        slices = _equal(length, count + more, price)
        if all(least <= s.length <= most for s in slices):
            return Chain(slices, ranks)
    if most >= least:
        # Slices of equal cost that keep the cap would be many more: those that reach it stop there.
        slices = tuple(evenly(0, length, count, price, most, least))
        if ranks == 1 or slices[-1].length >= least:
            return Chain(slices, ranks)
    return None


def _ends(length: int, count: int, price: PassCost) -> tuple[float, float]:
    """Tokens of the first of so many slices of equal cost, which is the longest, and of the last, the shortest."""
    whole_s = float(price.seconds(length))
    return price.tokens_within(0, whole_s / count), length - price.tokens_within(0, whole_s * (count - 1) / count)


def _equal(length: int, count: int, price: PassCost) -> tuple[Slice, ...]:
    """Slices of sequence 0 of equal cost."""
    whole = float(price.seconds(length))
    ends = [round(price.tokens_within(0, whole * k / count)) for k in range(count)] + [length]
    return tuple(Slice(0, a, b) for a, b in pairwise(ends))


def sharing(blocks: list[Block], cost_table: CostTable) -> list[Block]:
    """The blocks of a division with a way of sharing attention for every sequence that several ranks share."""
    chains: dict[int, list[Slice]] = {}
    for m in (m for block in blocks for one in block.rounds for m in one if len(m.ranks) > 1):
        chains.setdefault(m.slices[0].sequence, []).append(m.slices[0])
    best = cache(partial(_strategy, cost_table=cost_table))

    def shared(m: MicroBatch) -> MicroBatch:
        if len(m.ranks) == 1:
            return m
        pieces = tuple((s.length, s.start) for s in chains[m.slices[0].sequence])
        return best(pieces, len(m.ranks)).micro_batch(m.slices, m.ranks)

    return [Block([[shared(m) for m in one] for one in block.rounds]) for block in blocks]


def _strategy(pieces: tuple[tuple[int, int], ...], degree: int, *, cost_table: CostTable) -> CpStrategy:
    """The cp_comm that leaves least exposed over all slices; prefixes travel in a ring, and stay where heads are."""
    at, load = cost_table.context, load_of(pieces)
    directions = Direction(at.costs.forward, 1), Direction(at.costs.backward, 2)

    def seconds(strategy: CpStrategy) -> float:
        shared = SharedLoad(tuple(range(degree)), load, *strategy)
        return float(sum(attention_s(at, direction, shared).sum() for direction in directions))

    strategies = cost_table.strategies_of(degree)
    return strategies[0] if len(strategies) == 1 else min(strategies, key=seconds)


class _Grid(NamedTuple):
    used: Ints
    """Rounds of each rank that are taken, from the first on [ranks]."""
    lowest: list[int]
    """The least of them."""
    placed: list[tuple[Chain, int, int]]
    """(chain, first rank, first round)."""

    def takes(self, chain: Chain, step: int, tall: int) -> bool:
        """Put a chain onto the ranks that are free first, starting at multiples of ``step``; False if it ends above
        ``tall``."""
        if self.lowest[0] + len(chain.slices) > tall:
            return False
        windows = np.lib.stride_tricks.sliding_window_view(self.used, chain.degree)[::step].max(axis=1)
        first, at = int(windows.argmin()) * step, int(windows.min())
        if at + len(chain.slices) > tall:
            return False
        self.placed.append((chain, first, at))
        self.used[first : first + chain.degree] = at + len(chain.slices)
        self.lowest[0] = int(self.used.min())
        return True


def _blocks(
    chains: list[Chain],
    rest: list[int],
    lengths: Ints,
    round_s: float,
    price: PassCost,
    limits: Limits,
    cost_table: CostTable,
) -> list[Block]:
    """Chains longest first into the first block with room, then whole sequences into the emptiest cells."""
    num_ranks, node = limits.num_ranks, cost_table.node
    grids: list[_Grid] = []
    tall = max((len(chain.slices) for chain in chains), default=1)
    first_open: dict[tuple[int, int], int] = {}  # a block that refused a chain refuses all others of its shape
    for chain in sorted(chains, key=lambda c: (-len(c.slices), -c.degree, c.slices[0].sequence)):
        step = chain.degree if chain.degree <= node and node % chain.degree == 0 else 1
        shape = len(chain.slices), chain.degree
        tried = range(first_open.get(shape, 0), len(grids))
        number = next((k for k in tried if grids[k].takes(chain, step, tall)), len(grids))
        if number == len(grids):
            grids.append(_Grid(np.zeros(num_ranks, dtype=np.int64), [0], []))
            grids[number].takes(chain, step, tall)
        first_open[shape] = number
    blocks = [_laid_out(grid.placed, int(grid.used.max())) for grid in grids]
    cells = [[_idle(one, num_ranks) for one in block.rounds] for block in blocks]
    _fill(blocks, cells, rest, lengths, round_s, price, limits)
    for block in blocks:
        for one in block.rounds:
            one += [MicroBatch((), (rank,)) for rank in _idle(one, num_ranks)]
    return blocks


def _idle(micro_batches: list[MicroBatch], num_ranks: int) -> list[int]:
    busy = {rank for m in micro_batches for rank in m.ranks}
    return [rank for rank in range(num_ranks) if rank not in busy]


def _laid_out(placed: list[tuple[Chain, int, int]], count: int) -> Block:
    rounds: list[list[MicroBatch]] = [[] for _ in range(count)]
    for chain, first, at in placed:
        ranks = tuple(range(first, first + chain.degree))
        for k, piece in enumerate(chain.slices):
            rounds[at + k].append(MicroBatch((piece,), ranks))
    return Block(rounds)


def _fill(
    blocks: list[Block],
    free: list[list[list[int]]],
    rest: list[int],
    lengths: Ints,
    round_s: float,
    price: PassCost,
    limits: Limits,
) -> None:
    """Whole sequences, longest first, onto the emptiest cell with room; new rounds where there is none."""
    cells = [(b, k, rank) for b, rows in enumerate(free) for k, ranks in enumerate(rows) for rank in ranks]
    heap = [(0.0, c) for c in range(len(cells))]
    held, members = [0] * len(cells), [[] for _ in cells]  # type: list[int], list[list[int]]

    def another_round() -> None:
        blocks.append(Block([[]]))
        for rank in range(limits.num_ranks):
            heapq.heappush(heap, (0.0, len(cells)))
            cells.append((len(blocks) - 1, 0, rank))
            held.append(0)
            members.append([])

    seconds = price.seconds(lengths[rest].astype(np.float64)).tolist()
    all_s, tokens = sum(seconds), int(lengths[rest].sum())
    while len(cells) * round_s < all_s or len(cells) * limits.max_tokens < tokens:
        another_round()
    full: list[tuple[int, float, int]] = []  # by tokens, until sequences are short enough
    for i, each in zip(rest, seconds, strict=True):
        n = int(lengths[i])
        while full and full[0][0] + n <= limits.max_tokens:
            _, spent, c = heapq.heappop(full)
            heapq.heappush(heap, (spent, c))
        while heap and held[heap[0][1]] + n > limits.max_tokens:
            spent, c = heapq.heappop(heap)
            heapq.heappush(full, (held[c], spent, c))
        if not heap:
            another_round()
        spent, c = heap[0]
        heapq.heapreplace(heap, (spent + each, c))
        held[c] += n
        members[c].append(i)
    for (b, k, rank), sequences in zip(cells, members, strict=True):
        if sequences:
            blocks[b].rounds[k].append(
                MicroBatch(tuple(Slice(i, 0, int(lengths[i])) for i in sorted(sequences)), (rank,))
            )
