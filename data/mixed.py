"""Several sources as one, whose samples are numbered through all of them: what a mixture of domains is drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.aliases import Floats, Ints
from ..core.errors import EvenloadError, shorten
from .samples.numbering import DomainNumbers
from .sources import Source, targets_of


class MixedSource(Source):
    """The samples of every domain, by ascending names; it reads nothing by itself."""

    def __init__(self, parts: Mapping[str, Source]) -> None:
        self.parts = dict(sorted(parts.items()))
        self.name = f"{len(parts)} domains"
        self.lengths = np.concatenate([part.lengths for part in self.parts.values()])
        partly = any(part.targets is not None for part in parts.values())
        self.targets = np.concatenate([targets_of(part) for part in self.parts.values()]) if partly else None
        groups = self.columns()[2]
        self.groups = _in_a_row(list(groups.values())) if groups else None
        shared = any(part.trunks is not None for part in self.parts.values())
        own_trunks = [
            np.zeros_like(part.lengths) if part.trunks is None else part.trunks for part in self.parts.values()
        ]
        self.trunks = np.concatenate(own_trunks) if shared else None
        own_sums = [part.weight_sums for part in self.parts.values() if part.weight_sums is not None]
        assert len(own_sums) in (0, len(parts)), "a column of weights is asked of all domains"
        self.weight_sums = np.concatenate(own_sums) if own_sums else None
        divisors = [part.divisor for part in self.parts.values()]
        columns = [one for one in divisors if isinstance(one, np.ndarray)]
        self.divisor = np.concatenate(columns) if columns else divisors[0]
        self.numbers = DomainNumbers({name: len(part.lengths) for name, part in self.parts.items()})
        for column in (self.lengths, self.targets, self.groups, self.trunks, self.weight_sums):
            if column is not None:
                column.setflags(write=False)

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def columns(self) -> tuple[dict[str, Ints], dict[str, Ints], dict[str, Ints]]:
        """Tokens of each sample by domain, its targets likewise, and its group where there are any."""
        parts = self.parts.items()
        grouped = any(part.groups is not None for _, part in parts)
        groups: dict[str, Ints] = {name: _groups_of(part) for name, part in parts} if grouped else {}
        return {name: part.lengths for name, part in parts}, {name: targets_of(part) for name, part in parts}, groups

    @property
    def vocab_size(self) -> int:
        return max(part.vocab_size for part in self.parts.values())

    def tokens(self, index: int) -> NDArray[np.int64]:
        part, number = self._place_of(index)
        return part.tokens(number)

    def labels(self, index: int) -> NDArray[np.int64]:
        part, number = self._place_of(index)
        return part.labels(number)

    def weights(self, index: int) -> Floats:
        part, number = self._place_of(index)
        return part.weights(number)

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
        ((name, number),) = self.numbers.named(np.array([index]))
        return self.parts[name], number


def _groups_of(part: Source) -> Ints:
    """The group of each sample, which is its own where the domain has none."""
    return np.arange(len(part.lengths)) if part.groups is None else part.groups


def _in_a_row(groups: list[Ints]) -> NDArray[np.int64]:
    """Groups of several domains as one numbering."""
    firsts = np.cumsum([0, *(int(own.max()) + 1 for own in groups)])
    return np.concatenate([own + first for own, first in zip(groups, firsts, strict=False)])


@contextmanager
def naming_domain(name: str) -> Iterator[None]:
    """Errors inside name the domain."""
    try:
        yield
    except EvenloadError as error:
        raise EvenloadError(f"the domain {shorten(name)}: {error.what}", error.found, error.do) from error
