"""Global batches of whole groups: `SampleOrder` is then one of groups, and a batch takes them until it is full."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...core.aliases import Ints
from ...core.errors import EvenloadError
from .order import BatchSize, SampleOrder


class Groups:
    """Whose samples stay together. ``groups``: [num_samples] of 0 .. num_groups-1, each with a sample."""

    def __init__(self, groups: Ints) -> None:
        self.counts = np.bincount(groups)
        """[num_groups] samples of each."""
        self._members = np.argsort(groups, kind="stable")
        self._stops = np.cumsum(self.counts)

    def members(self, group: int) -> NDArray[np.int64]:
        """The samples of a group, ascending."""
        return self._members[self._stops[group] - self.counts[group] : self._stops[group]]


class WholeGroups:
    """Takes groups in their order until their samples, or their tokens, are those of a batch or more.

    Args:
        groups: the group of each sample, [num_samples] of 0 .. num_groups-1, each with a sample.
        lengths: [num_samples] tokens of each.
        size: what a batch holds, at least.
    """

    def __init__(self, groups: Ints, lengths: Ints, size: BatchSize) -> None:
        self.groups = groups
        self._groups = Groups(groups)
        of_samples = size.tokens is None
        self._sizes = self._groups.counts if of_samples else np.bincount(groups, lengths).astype(np.int64)
        self._size = BatchSize(self.num_groups, size.samples if of_samples else size.tokens)
        self._of_samples = of_samples

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return len(self._groups.counts)

    def take(self, order: SampleOrder) -> tuple[NDArray[np.int64], SampleOrder]:
        """The samples of the next batch, never none, side by side those of a group; and the order after them."""
        chosen, after = self._size.take(order, self._sizes)
        return np.concatenate([self._groups.members(group) for group in chosen]), after

    def steps(self, seed: int, *, epochs: int | None = None, tokens: int | None = None) -> int:
        """Steps of so many epochs, or until so many tokens are drawn. Raises EvenloadError where nobody can say."""
        if tokens is not None and self._of_samples:
            do = "set train.steps or train.epochs, or train.global_batch_tokens in place of global_batch_size"
            what = "steps of whole groups of samples are not counted in tokens"
            raise EvenloadError(what, f"train.max_tokens {tokens}, data.group", do)
        return self._size.steps(self._sizes, seed, epochs=epochs, tokens=tokens)
