"""A bound on planning that every rank reaches at the same place: work is counted, never timed."""

from __future__ import annotations


class Work:
    """Units of work that are left, about a microsecond each."""

    def __init__(self, units: int) -> None:
        self._left = units

    def spend(self, units: int) -> bool:
        """Take so many; False where no more are left."""
        self._left -= units
        return self._left >= 0
