"""Variants of a script, each marked with what must come of it: it is planned, stays as it is with a word, or is refused
before an update."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from evenload.core.errors import EvenloadError
from evenload.integrations.unmodified import planned_loop
from evenload.patches.session import enabled
from evenload.runtime.attributes import with_attributes
from trainer_runs import Gradients, error_of, recipe


class Ran(NamedTuple):
    """What one run came to."""

    losses: list[float]
    gradients: list[Gradients]
    """Before its updates."""


class Variants:
    """The variants of one file.

    Args:
        run: one of them, stock or planned.
        reporter: the module that says why one is not planned.
        max_tokens: of a pack.
    """

    def __init__(self, run: Callable[[Any], Ran], reporter: Any, max_tokens: int) -> None:
        self._run, self._reporter, self._max_tokens = run, reporter, max_tokens
        self._marked: dict[str, list[tuple[Any, Any]]] = {"planned": [], "stays": [], "refused": []}

    def planned(self, steps: int) -> Callable[[Any], Any]:
        """So many steps of this class are planned, and train what they train without evenload."""
        return self._mark("planned", ["packs"] * steps)

    def stays(self, why: str) -> Callable[[Any], Any]:
        return self._mark("stays", why)

    def refused(self, why: str) -> Callable[[Any], Any]:
        return self._mark("refused", why)

    def _mark(self, kind: str, wanted: Any) -> Callable[[Any], Any]:
        def mark(variant: Any) -> Any:
            self._marked[kind].append((variant, wanted))
            return variant

        return mark

    def of_kind(self, kind: str) -> dict[str, dict[str, Any]]:
        """What came of all variants of a kind, and what is wanted of each, by name: "by tokens" of ByTokens."""
        return {_words(variant): self.compared(variant) | {"wanted": wanted} for variant, wanted in self._marked[kind]}

    def compared(self, variant: Any, **packing: Any) -> dict[str, Any]:
        """Errors of a variant against itself without evenload, what ran in its planned steps, what was said and
        refused."""
        stock, planned, said = self._run(variant), [], []
        result: dict[str, Any] = {"planned": planned, "said": said, "refused": "", "grad": None, "loss": None}

        def note(loop: str, chain: Any, *_: Any, **__: Any) -> None:
            planned.append("rows" if chain.caps.padded else "packs")

        def say(*words: str) -> None:
            said.append(" ".join(words))

        try:
            with (
                with_attributes(planned_loop, report_step=note, report_idle=say),
                with_attributes(self._reporter, report_idle=say),
                enabled(recipe(packing={"max_tokens": self._max_tokens, **packing})),
            ):
                own = self._run(variant)
        except EvenloadError as error:
            return result | {"refused": str(error)}
        grad = max(error_of(a, b) for a, b in zip(own.gradients, stock.gradients, strict=True))
        return result | {
            "grad": grad,
            "loss": max((abs(a - b) for a, b in zip(own.losses, stock.losses, strict=True)), default=0.0),
        }


def _words(variant: Any) -> str:
    return re.sub("(?<=.)(?=[A-Z])", " ", variant.__name__).lower()
