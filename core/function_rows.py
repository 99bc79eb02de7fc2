"""Rows of functions that the host, plugins and other packages offer by name, each imported when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

from .errors import EvenloadError


@dataclass(frozen=True)
class FunctionRow:
    """A function that the host, a plugin, or another package offers under a name."""

    name: str
    function: str
    """``module:function``"""
    order: int = 1000
    """Rows come by ascending ``order``, then by name."""


R = TypeVar("R", bound=FunctionRow)


class FunctionRows(Generic[R]):
    """All rows of a class. Other packages offer theirs by entry points, ``name = "module:function"``."""

    def __init__(self, kind: str, row: type[R]) -> None:
        self._kind, self._row = kind, row
        self._rows: dict[str, R] = {}
        self.group = f"evenload.{kind.replace(' ', '_')}s"
        """Of the entry points."""

    def register(self, row: R) -> R:
        """Add a row under its name. Raises EvenloadError if another one has it."""
        known = self._rows.setdefault(row.name, row)
        if known != row:
            detail = f"{known.function} is registered, {row.function} wants the name"
            do = "rename one, or uninstall its package"
            raise EvenloadError(f"two {self._kind}s are called '{row.name}'", detail, do)
        return row

    def registered(self) -> dict[str, R]:
        """All rows by their names, in their order."""
        return dict(sorted(self._rows.items(), key=lambda item: (item[1].order, item[0])))

    def load_entry_points(self) -> None:
        """Register what other packages offer; nothing is imported. Raises EvenloadError where a name is taken."""
        for entry in entry_points(group=self.group):
            self.register(self._row(entry.name, entry.value))

    def imported(self, row: R, function: str = "") -> Any:
        """The function of a row, or another one that it names. Raises EvenloadError where it cannot be imported."""
        try:
            return resolve_name(function or row.function)
        except Exception as error:
            detail = f"{function or row.function}: {type(error).__name__}: {error}"
            do = "repair or uninstall the package that brings it"
            raise EvenloadError(f"the {self._kind} '{row.name}' cannot be imported", detail, do) from error
