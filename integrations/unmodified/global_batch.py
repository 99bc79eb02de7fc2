"""The global batch of a loop that nobody edits: all samples of one step, in the order of a stock run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...core.plan.step_plan import Lengths, as_lengths

Sample = TypeVar("Sample")

Place = tuple[int, int, int]
"""(rank, micro-batch of the rank, row of the micro-batch) of a sample."""


@dataclass(frozen=True, eq=False)
class GlobalBatch(Generic[Sample]):
    """The samples that all ranks bring to a step, numbered micro-batch by micro-batch, rank by rank."""

    places: tuple[Place, ...]
    """Where the stock run has each sample."""
    lengths: Lengths
    own: Mapping[int, Sample]
    """What this rank has read, by number."""

    @classmethod
    def of(
        cls, lengths: Sequence[Sequence[Sequence[int]]], read: Sequence[Sequence[Sample]], rank: int
    ) -> GlobalBatch[Sample]:
        """The samples of these lengths.

        Args:
            lengths: tokens of each sample by rank, micro-batch and row; the same on all ranks.
            read: the samples of this rank, by micro-batch and row.
        """
        places = tuple(
            (other, place, row)
            for place in range(max(map(len, lengths)))
            for other, brought in enumerate(lengths)
            for row in range(len(brought[place]) if place < len(brought) else 0)
        )
        own = {i: read[place][row] for i, (other, place, row) in enumerate(places) if other == rank}
        return cls(places, as_lengths([lengths[other][place][row] for other, place, row in places]), own)

    @property
    def source(self) -> list[int]:
        """The rank that has read each sample."""
        return [rank for rank, _, _ in self.places]

    def is_even(self, num_ranks: int) -> bool:
        """Whether all samples are of one length and each rank brings as many: then the stock step pads none of them
        and no rank waits."""
        counts = [self.source.count(rank) for rank in range(num_ranks)]
        return len(set(self.lengths.tolist())) == 1 and len(set(counts)) == 1

    def numbers_of(self, rank: int, num_micro_batches: int) -> list[list[int]]:
        """The samples of each of a rank's own micro-batches."""
        numbers: list[list[int]] = [[] for _ in range(num_micro_batches)]
        for i, (other, place, _) in enumerate(self.places):
            if other == rank:
                numbers[place].append(i)
        return numbers
