"""What `evenload profile` runs: training steps in which every rank has the same work at the same time.

whole    one micro-batch of n sequences of L tokens, n and L by powers of four
several  four micro-batches of that: what a step takes once and what every launch takes come apart
chain    n sequences cut into slices, all forwards and then all backwards: attention over prefixes, as plans with an
         order run it
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ...core.costs.costs import Work, work_of
from ...core.laws import check
from ...core.plan.limits import Limits
from ...core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths

FACTOR = 4
SHORTEST = 64
SHORTEST_SLICE = 128


@dataclass(frozen=True)
class Case:
    """Each rank: ``count`` times ``num`` sequences of ``length`` tokens, each cut into ``cuts`` slices."""

    num: int
    length: int
    count: int = 1
    cuts: int = 1

    @property
    def tokens(self) -> int:
        """Tokens that a rank runs in the case."""
        return self.count * self.num * self.length

    @property
    def slots(self) -> int:
        """Slots of the largest micro-batch."""
        return self.num * -(-self.length // self.cuts)

    @property
    def work(self) -> Work:
        """Work of a rank in one direction."""
        return work_of(self.plan(1).micro_batches)

    def plan(self, num_ranks: int) -> StepPlan:
        """The checked step of all ranks."""
        per_rank = self.count * self.num
        batch = as_lengths([self.length] * (num_ranks * per_rank))
        borders = list(pairwise(self.length * i // self.cuts for i in range(self.cuts + 1)))
        micro_batches = tuple(
            MicroBatch(tuple(Slice(first + i, start, stop) for i in range(self.num)), (rank,))
            for group in range(self.count)
            for start, stop in borders
            for rank in range(num_ranks)
            for first in [rank * per_rank + group * self.num]
        )
        order: tuple[tuple[Op, ...], ...] = ()
        if self.cuts > 1:
            chain = self.cuts * num_ranks
            starts = range(0, len(micro_batches), chain)
            order = (tuple(op for first in starts for op in there_and_back(range(first, first + chain))),)
        return check(StepPlan(batch, micro_batches, Limits(num_ranks, self.slots), order=order, made_by="profile"))

    def __str__(self) -> str:
        text = f"{self.num} x {self.length}" + (f" in {self.cuts} slices" if self.cuts > 1 else "")
        return f"{self.count} times {text}" if self.count > 1 else text


def there_and_back(numbers: range) -> tuple[Op, ...]:
    """All forwards, then all backwards in reverse."""
    return (*(Op("F", i) for i in numbers), *(Op("B", i) for i in reversed(numbers)))


def cases(max_length: int, max_tokens: int) -> list[Case]:
    """Cases of at most these tokens a sequence and a micro-batch, little work first.

    Two lengths at least differ at equal tokens, which is what tells ``token_s`` and ``pair_s`` apart.
    """
    lengths = [n for n in (SHORTEST * FACTOR**k for k in range(12)) if n < max_length] + [max_length]
    whole = [Case(FACTOR**k, n) for n in lengths for k in range(5) if FACTOR**k * n <= max_tokens]
    several = [Case(c.num, c.length, FACTOR) for c in whole if FACTOR * c.tokens <= max_tokens]
    # Of many sequences in slices a few say enough; of single ones all are wanted.
    chains = [
        Case(num, n, cuts=cuts)
        for n in lengths
        for num, cuts in ((1, 2), (1, FACTOR), (1, 2 * FACTOR), (FACTOR, FACTOR))
        if n >= cuts * SHORTEST_SLICE and num * n <= cuts * max_tokens
    ]
    return sorted({*whole, *several, *chains}, key=lambda c: (c.tokens, c.work.pairs, c.work.launches, c.num))
