"""Numbers that are joined to each other, directly or over others (union-find; Tarjan, J. ACM 1975)."""

from __future__ import annotations

from collections.abc import Iterable


class Joined:
    """The numbers 0 .. count - 1, at first each by itself."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def first(self, number: int) -> int:
        """The least of all numbers that are joined to this one."""
        parent = self._parent
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    def join(self, numbers: Iterable[int]) -> int:
        """Join these to each other; the least of all that are joined then."""
        firsts = {self.first(number) for number in numbers}
        least = min(firsts)
        for number in firsts:
            self._parent[number] = least
        return least
