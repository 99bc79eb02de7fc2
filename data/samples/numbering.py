"""One numbering of the samples of several domains: those of one lie side by side, domain after domain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.aliases import Ints


class DomainNumbers:
    """Numbers of samples through all domains. ``sizes``: samples of each, in the order of the numbers."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.names = tuple(self.sizes)
        self.firsts = np.concatenate([[0], np.cumsum(list(self.sizes.values()), dtype=np.int64)])
        """[domains + 1] number of the first sample of each, and how many there are."""

    def domain_of(self, samples: Ints) -> NDArray[np.int64]:
        """The place of each sample's domain among the names."""
        return np.searchsorted(self.firsts, samples, side="right") - 1

    def named(self, samples: Ints) -> list[list[Any]]:
        """[domain, number in the domain] of each sample, which hold when other domains come and go."""
        places = self.domain_of(samples)
        numbers = (np.asarray(samples) - self.firsts[places]).tolist()
        return [[self.names[place], number] for place, number in zip(places.tolist(), numbers, strict=True)]

    def number_of(self, name: str, number: int) -> int | None:
        """The number of a domain's sample through all domains; None where the domain is not here. Raises ValueError
        where it has no such sample."""
        if name not in self.sizes:
            return None
        if not 0 <= number < self.sizes[name]:
            raise ValueError(f"sample {number} of {name}")
        return int(self.firsts[self.names.index(name)]) + number
