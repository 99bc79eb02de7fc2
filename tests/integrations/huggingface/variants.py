"""Variants of a script, each marked with what must come of it: it is planned, stays as it is with a word, or is refused
before an update."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from evenload.core.errors import EvenloadError
from trainer_runs import Gradients, error_of, planned_by, recipe


class Ran(NamedTuple):
    losses: list[float]
    gradients: list[Gradients]
    """Before its updates."""


class Variants:
    """The variants of one file.

    Args:
        run: one of them, stock or planned.
        max_tokens: of a pack.
    """

    def __init__(self, run: Callable[[Any], Ran], max_tokens: int) -> None:
        self._run, self._max_tokens = run, max_tokens
        self._marked: dict[str, list[tuple[Any, Any]]] = {"planned": [], "stays": [], "refused": []}

    def planned(self, steps: int, **own: Any) -> Callable[[Any], Any]:
        """So many steps of this class, with these arguments, are planned and train what they train without evenload."""
        return self._mark("planned", ["packs"] * steps, own)

    def stays(self, why: str, **own: Any) -> Callable[[Any], Any]:
        return self._mark("stays", why, own)

    def refused(self, why: str, **own: Any) -> Callable[[Any], Any]:
        return self._mark("refused", why, own)

    def _mark(self, kind: str, wanted: Any, own: dict[str, Any]) -> Callable[[Any], Any]:
        def mark(variant: Any) -> Any:
            if own:
                variant.arguments = own
            self._marked[kind].append((variant, wanted))
            return variant

        return mark

    def of_kind(self, kind: str) -> dict[str, dict[str, Any]]:
        """What came of all variants of a kind, and what is wanted of each, by name: "by tokens" of ByTokens."""
        return {_words(variant): self.compared(variant) | {"wanted": wanted} for variant, wanted in self._marked[kind]}

    def compared(self, variant: Any, **packing: Any) -> dict[str, Any]:
        """Errors of a variant against itself without evenload, what ran in its planned steps, what was said and
        refused."""
        stock, own, refused = self._run(variant), None, ""
        with planned_by(recipe(packing={"max_tokens": self._max_tokens, **packing})) as seen:
            try:
                own = self._run(variant)
            except EvenloadError as error:
                refused = str(error)
        planned = ["rows" if chain.caps.padded else "packs" for chain in seen.chains]
        result = {"planned": planned, "said": seen.said, "refused": refused, "grad": None, "loss": None}
        if own is None:
            return result
        grad = max(error_of(a, b) for a, b in zip(own.gradients, stock.gradients, strict=True))
        loss = max((abs(a - b) for a, b in zip(own.losses, stock.losses, strict=True)), default=0.0)
        return result | {"grad": grad, "loss": loss}


def _words(variant: Any) -> str:
    return re.sub("(?<=.)(?=[A-Z])", " ", variant.__name__).lower()
