"""Several sources as one, whose samples are numbered through all of them: what a mixture of domains is drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.aliases import Ints
from ..core.errors import EvenloadError, shorten
from .sources import Source, targets_of


class MixedSource(Source):
    """The samples of every domain, by ascending names; it reads nothing by itself."""

    def __init__(self, parts: Mapping[str, Source]) -> None:
        self.parts = dict(sorted(parts.items()))
        self.name = f"{len(parts)} domains"
        self.lengths = np.concatenate([part.lengths for part in self.parts.values()])
        partly = any(part.targets is not None for part in parts.values())
        self.targets = np.concatenate([targets_of(part) for part in self.parts.values()]) if partly else None
        self.groups = None
        self._firsts = np.concatenate([[0], np.cumsum([len(part.lengths) for part in self.parts.values()])])
        for column in (self.lengths, self.targets):
            if column is not None:
                column.setflags(write=False)

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def domain_of(self, samples: Ints) -> NDArray[np.int64]:
        """The place of each sample's domain among `domains`."""
        return np.searchsorted(self._firsts, samples, side="right") - 1

    @property
    def vocab_size(self) -> int:
        return max(part.vocab_size for part in self.parts.values())

    def tokens(self, index: int) -> NDArray[np.int64]:
        part, number = self._place_of(index)
        return part.tokens(number)

    def labels(self, index: int) -> NDArray[np.int64]:
        part, number = self._place_of(index)
        return part.labels(number)

    def report(self) -> dict[str, Any]:
        """The report of every domain, and sums of what is counted in all of them."""
        reports = {name: part.report() for name, part in self.parts.items()}
        names = ("documents", "samples", "tokens", "targets", "without_target", "tokens_left_out")
        sums = {key: sum(one[key] for one in reports.values()) for key in names}
        longest = max(one["longest"] for one in reports.values())
        return {"source": self.name, **sums, "longest": longest, "domains": reports, "fingerprint": self.fingerprint}

    @property
    def fingerprint(self) -> str:
        """Equal for equal domains under equal names."""
        return " ".join(f"{name}:{part.fingerprint}" for name, part in self.parts.items())

    @property
    def fingerprints(self) -> dict[str, str]:
        """What a checkpoint keeps, so that each domain is compared by itself."""
        return {name: part.fingerprint for name, part in self.parts.items()}

    def _place_of(self, index: int) -> tuple[Source, int]:
        if not 0 <= index < len(self.lengths):
            raise IndexError(f"sample {index} of {len(self.lengths)}")
        place = int(self.domain_of(np.array(index)))
        return list(self.parts.values())[place], index - int(self._firsts[place])


@contextmanager
def naming_domain(name: str) -> Iterator[None]:
    """Errors inside name the domain."""
    try:
        yield
    except EvenloadError as error:
        raise EvenloadError(f"the domain {shorten(name)}: {error.what}", error.found, error.do) from error
