"""What a mixture draws, counted apart from it: the orders of its domains, and what their shares say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from evenload.data.samples.mixture import seed_of
from evenload.data.samples.order import SampleOrder


def own_order(name: str, size: int, count: int, seed: int = 3) -> list[int]:
    """The first samples of a domain's order, whatever stands beside it."""
    order, out = SampleOrder(size, seed_of(name, seed)), list[int]()
    while len(out) < count:
        samples, order = order.take(count - len(out))
        out += samples.tolist()
    return out


class Accounts:
    """What was drawn of each domain, and how much of that its shares say."""

    def __init__(self) -> None:
        self._due, self._paid = Counter[str](), Counter[str]()

    def draw(self, name: str, price: int, shares: Mapping[str, float]) -> None:
        self._paid[name] += price
        for one, share in shares.items():
            self._due[one] += price * share  # type: ignore[assignment]

    def ahead(self) -> dict[str, float]:
        return {name: self._paid[name] - due for name, due in self._due.items()}
