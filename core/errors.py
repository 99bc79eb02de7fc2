"""The one error family of evenload: what is wrong, what was found, what to do."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

SHOWN = 200
"""Characters of what a user gave that a message repeats."""

_MOST_TEXT = 2000
"""Characters of each part of a message, which names of files and keys are in too."""


class EvenloadError(ValueError):
    """A request that cannot be carried out, told in three parts.

    ``what`` is the fault, ``found`` the values that were met, ``do`` the remedy. The command line prints it and exits
    with 2; nothing has been started or written by then unless the text says so.
    """

    def __init__(self, what: str, found: str = "", do: str = "") -> None:
        self.what = shorten(what, _MOST_TEXT)
        self.found = shorten(found, _MOST_TEXT)
        self.do = shorten(do, _MOST_TEXT)
        super().__init__(self.what, self.found, self.do)

    def __str__(self) -> str:
        rest = (f"{word}: {part}" for word, part in (("found", self.found), ("do", self.do)) if part)
        return "\n  ".join([self.what, *rest])


Rule = tuple[bool, str, str, str]
"""Whether something is wrong, and the three parts of the `EvenloadError` that says so."""


def refuse_first(*rules: Rule) -> None:
    """Raise EvenloadError for the first rule that is broken."""
    for broken, what, detail, do in rules:
        if broken:
            raise EvenloadError(what, detail, do)


class PlanError(EvenloadError):
    """A plan that breaks a law: no rank may run it."""


class RankError(EvenloadError):
    """A rank failed, hung or disagreed while the job ran (the work failed: exit code 1, not 2)."""


class RequestError(EvenloadError):
    """What is wrong in what was asked for, whatever the script does: it does not run on as if nothing had been."""


@contextmanager
def of_request() -> Iterator[None]:
    """Inside, an EvenloadError is a `RequestError`."""
    try:
        yield
    except EvenloadError as error:
        raise RequestError(error.what, error.found, error.do) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: ``did you mean 'tokens'? known: ...``."""
    names = sorted(known)
    close = difflib.get_close_matches(name[:SHOWN], names, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"


def shorten(text: str, most: int = SHOWN) -> str:
    """The text in at most so many characters, with escapes for what would steer a terminal."""
    cut = text if len(text) <= most else f"{text[: most - 4]} ..."
    plain = cut if cut.isprintable() else "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in cut)
    return plain if len(plain) <= most else f"{plain[: most - 4]} ..."


def shown(value: Any) -> str:
    """`repr` of what a user gave in at most `SHOWN` characters; takes no longer for a value that would fill a disk."""
    return shorten(_SHORT.repr(value))


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = SHOWN

    def repr_int(self, value: int, level: int) -> str:
        """Python refuses to write integers of thousands of digits."""
        return repr(value) if value.bit_length() <= SHOWN else f"an integer of {value.bit_length()} bits"

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value[:SHOWN])


_SHORT = _Short()
