"""The one error family of evenload: what is wrong, what was found, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EvenloadError(ValueError):
    """A request that cannot be carried out, told in three parts.

    ``what`` is the fault, ``found`` the values that were met, ``do`` the remedy. The command line prints it and exits
    with 2; nothing has been started or written by then unless the text says so.
    """

    def __init__(self, what: str, found: str = "", do: str = "") -> None:
        self.what, self.found, self.do = what, found, do
        super().__init__(what, found, do)

    def __str__(self) -> str:
        parts = [self.what]
        if self.found:
            parts.append(f"found: {self.found}")
        if self.do:
            parts.append(f"do: {self.do}")
        return "\n  ".join(parts)


class PlanError(EvenloadError):
    """A plan that breaks a law: no rank may run it."""


class RankError(EvenloadError):
    """A rank failed, hung or disagreed while the job ran (the work failed: exit code 1, not 2)."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: ``did you mean 'tokens'? known: ...``."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"
