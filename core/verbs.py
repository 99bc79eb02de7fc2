"""The verbs of the command line, a row each, and the tables that plugins show of their results; what a row names is
imported when somebody asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, NamedTuple

from .errors import EvenloadError
from .function_rows import FunctionRow, FunctionRows


@dataclass(frozen=True)
class Verb(FunctionRow):
    """A verb: the signature of its function has the arguments and options, annotated for typer, its docstring the help.
    Help lists verbs in their order."""

    runs_command: bool = False
    """It takes the words of a command to run, with options that are not its own."""
    rows: str = ""
    """A module whose patch rows go on in the processes of that command, in place of the trainer's."""


class ResultTable(NamedTuple):
    """A table of a plugin, for a terminal and for a page: the first column left, numbers right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    bold: int | None = None
    """The row that is set bold."""


VERBS = FunctionRows("verb", Verb)
register = VERBS.register

_tables: dict[tuple[str, str], str] = {}


def register_tables(verb: str, key: str, function: str) -> None:
    """Results of a verb of the host that have ``key`` are shown by what ``module:function`` makes of them, a list of
    `ResultTable`. Raises EvenloadError if another one shows them."""
    known = _tables.setdefault((verb, key), function)
    if known != function:
        detail = f"{known} is registered, {function} wants to"
        raise EvenloadError(f"two plugins show '{key}' of '{verb}'", detail, "uninstall the package of one")


def tables_of(verb: str, result: Mapping[str, Any]) -> list[ResultTable]:
    """What plugins show of a result."""
    functions = [function for (of, key), function in _tables.items() if of == verb and key in result]
    return [table for function in functions for table in resolve_name(function)(result)]
