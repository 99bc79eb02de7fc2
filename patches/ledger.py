"""The engine that applies patch rows and takes them out again, exactly.

apply   all rows or none. Every row is checked against the version before anything is touched, then against that of the
        loaded module, the symbol, who made it and its signature. ``from module import name`` copies taken earlier are
        rebound as well.
lazy    a row whose module is not loaded yet waits for it and is applied right after the module's body.
undo    last on, first off; every entry gets back the very object that was found there, and what had not been there is
        deleted. Names imported while the patch was on are set back too. If anybody has changed an entry since, nothing
        is undone and the error names the stranger.

Rows that wrap one symbol stack in the order in which they are given. A row that some ledger of the process already
holds is not applied again. Not safe against a thread that imports the same modules meanwhile.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement

from ..core.errors import EvenloadError
from ..integrations.host.versions import describe_version
from .import_hook import ImportHook
from .row import Patch, check_owner, check_signature, check_version, is_needed_by_version, missing_symbol
from .slots import MISSING, Slot, describe, globals_holding, is_loading, locate, within
from .wrapping import PatchedFunction

__all__ = ["Ledger", "Patch", "Status"]

_log = logging.getLogger(__name__)
_Identity = tuple[str, str]
_holders: dict[_Identity, Ledger] = {}
"""Which ledger of the process has a row on, or waits for its module."""


class Status(NamedTuple):
    """A line of `Ledger.table`: a patch row and its state."""

    row: Patch
    state: Literal["applied", "pending", "skipped"]
    note: str
    """Copies that were rebound, the module that is awaited, or why there was nothing to do."""


class _Change(NamedTuple):
    slot: Slot
    before: Any
    """The raw value, MISSING where the entry had none of its own."""
    after: Any


@dataclass
class _Applied:
    row: Patch
    changes: list[_Change]
    """The target first, then the copies."""
    original: Any
    late_reach: tuple[str, ...] | None = None
    """Where names imported while the patch was on are looked for."""


class Ledger:
    """Rows that are on, in the order in which they were put on. As a context manager it undoes them at the end."""

    def __init__(self) -> None:
        self._applied: list[_Applied] = []
        self._pending: dict[_Identity, Patch] = {}
        self._skipped: dict[_Identity, Status] = {}
        self._hook = ImportHook(self._after_import)

    def apply(self, rows: Iterable[Patch], *, lazy: bool = False) -> None:
        """Put every row on, or none of them; rows that are already on are left as they are.

        Modules that are not loaded are imported, or with ``lazy`` awaited: their rows go on during the import that
        somebody else makes, and a row that fails there undoes the whole ledger and fails that import.

        Raises `EvenloadError` for an unsupported version, a missing symbol, a changed signature, or a re-export or a
        symbol with an owner that somebody else has replaced.
        """
        rows = tuple(rows)
        wanted = {row.identity for row in rows if self._wants(row)}
        for row in rows:
            if row.identity in wanted:
                check_version(row)
        mark, pending = len(self._applied), set(self._pending)
        try:
            for row in rows:
                if not lazy and row.identity in self._pending:
                    _slot_of(row)
                elif row.identity not in wanted or row.identity in _holders:
                    continue
                elif lazy and row.module not in sys.modules:
                    self._await(row)
                else:
                    self._put_on(row)
        except BaseException:
            for row in [row for row in self._pending.values() if row.identity not in pending]:
                self._forget(row)
            self._unwind(min(mark, len(self._applied)))
            raise

    def undo(self) -> None:
        """Take every row off, last on first off, and stop waiting for modules; a second call does nothing.

        Raises `EvenloadError`, and changes nothing, if an entry is no longer what this ledger put there.
        """
        self._check_untouched(self._applied)
        for row in list(self._pending.values()):
            self._forget(row)
        self._skipped.clear()
        self._unwind(0)

    def table(self) -> tuple[Status, ...]:
        """What became of every row, in the order on, awaited, not needed."""
        on = [Status(a.row, "applied", ", ".join(c.slot.path for c in a.changes[1:])) for a in self._applied]
        awaited = [Status(row, "pending", f"waits for the import of {row.module}") for row in self._pending.values()]
        return (*on, *awaited, *self._skipped.values())

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def _wants(self, row: Patch) -> bool:
        holder = _holders.get(row.identity)
        if holder is self:
            return False
        self._skipped.pop(row.identity, None)
        if holder is not None:
            self._skip(row, "already held by another ledger of this process")
        elif row.when is not None and not row.when():
            self._skip(row, f"not needed here: {row.when.__name__} is false")
        elif not is_needed_by_version(row):
            self._skip(row, _other_version(row))
        return row.identity not in self._skipped

    def _skip(self, row: Patch, why: str) -> None:
        self._skipped[row.identity] = Status(row, "skipped", why)

    def _await(self, row: Patch) -> None:
        self._hook.watch(row.module)
        self._pending[row.identity] = row
        _holders[row.identity] = self

    def _forget(self, row: Patch) -> None:
        del self._pending[row.identity], _holders[row.identity]
        if all(other.module != row.module for other in self._pending.values()):
            self._hook.cancel(row.module)

    def _after_import(self, module: str) -> None:
        ready = [row for row in self._pending.values() if row.module == module]
        for row in ready:
            self._forget(row)
        try:
            for row in ready:
                self._put_on(row)
        except BaseException:
            self.undo()
            raise

    def _put_on(self, row: Patch) -> None:
        slot = _slot_of(row)
        check_version(row)  # its module is loaded now, and may be another than the installed one
        if not is_needed_by_version(row):
            self._skip(row, _other_version(row))
            return
        original = slot.resolve()
        if row.fills_gap and original is not MISSING:
            self._skip(row, f"{row.target} is there already")
            return
        if original is MISSING and not row.fills_gap:
            raise missing_symbol(row, row.target)
        if original is not MISSING:
            check_owner(row, original)
            check_signature(row, slot.bound())
        copies = _copies(row, slot, original)
        after = PatchedFunction(original, row) if row.wrapper else row.replace(original)  # type: ignore[misc]
        applied = _Applied(row, [], original, row.reach if _may_be_copied(slot, original) else ())
        self._applied.append(applied)
        _holders[row.identity] = self
        for place in (slot, *copies):
            before = place.read()
            place.write(after)
            applied.changes.append(_Change(place, before, after))
        if foreign := [copy.path for copy in copies if _is_foreign(copy, row)]:
            _log.warning("patch '%s' also rebound copies of %s in %s", row.name, row.target, ", ".join(foreign))

    def _unwind(self, mark: int) -> None:
        """Take off the rows above ``mark``, last on first off; all of them or none."""
        self._check_untouched(self._applied[mark:])
        while len(self._applied) > mark:
            applied = self._applied.pop()
            for change in reversed(applied.changes):
                # A copy that its owner has deleted needs nothing; the target cannot get here deleted.
                if change.slot.read() is not MISSING:
                    change.slot.write(change.before)
            after = applied.changes[0].after if applied.changes else None
            if callable(applied.original) and callable(after):
                for late in list(globals_holding(after, applied.late_reach)):
                    late.write(applied.original)
            _holders.pop(applied.row.identity, None)

    @staticmethod
    def _check_untouched(rows: list[_Applied]) -> None:
        """Raise unless taking these rows off, last first, would find at every entry what was put there."""
        unwound: dict[tuple[int, str], Any] = {}
        for applied in reversed(rows):
            for index, (slot, before, after) in reversed(list(enumerate(applied.changes))):
                current = unwound.get(slot.place, slot.read())
                if not slot.same(current, after) and not (index > 0 and current is MISSING):
                    raise EvenloadError(
                        f"patch '{applied.row.name}' cannot be undone: somebody has changed {slot.path} since",
                        describe(current),
                        "take that change off first (last on, first off), then undo again; nothing was undone",
                    )
                unwound[slot.place] = before


def put_back(rows: Iterable[Patch]) -> list[str]:
    """Put wrappers that are on again around what others have assigned in their places since; what that is.

    For programs that write a method anew, from the source of the one that they find. Undoing names them, as any change.
    """
    lost = []
    for row in rows:
        held = _holders.get(row.identity)
        applied = next((a for a in (held._applied if held else ()) if a.row.identity == row.identity), None)
        if held is None or applied is None:
            continue
        slot = applied.changes[0].slot
        if (there := slot.read()) is MISSING or _reaches(there, row):
            continue
        after = PatchedFunction(there, applied.row)
        slot.write(after)
        held._applied.append(_Applied(applied.row, [_Change(slot, there, after)], there, ()))
        lost.append(f"{slot.path}: {describe(there)}")
    return lost


def _reaches(value: Any, row: Patch) -> bool:
    """Whether a function is the wrapper of a row, or says that it wraps one that is."""
    while value is not None:
        if isinstance(value, PatchedFunction) and value._self_row.identity == row.identity:
            return True
        value = getattr(value, "__wrapped__", None)
    return False


def _other_version(row: Patch) -> str:
    return f"not needed here: only {row.only} of {Requirement(row.supports).name} needs it"


def _slot_of(row: Patch) -> Slot:
    try:
        return locate(row.target)
    except AttributeError as error:
        raise missing_symbol(row, row.target) from error
    except ImportError as error:
        raise EvenloadError(
            f"patch '{row.name}': {row.module} cannot be imported",
            f"{type(error).__name__}: {error}, with {describe_version(Requirement(row.supports).name)}",
            f"repair the installation ({row.supports}), or leave the patch out",
        ) from error


def _may_be_copied(slot: Slot, original: Any) -> bool:
    return isinstance(slot.holder, ModuleType) and callable(original)


def _copies(row: Patch, slot: Slot, original: Any) -> list[Slot]:
    """The declared re-exports, checked, and every other module global that is the original."""
    declared = [alias_slot for alias in row.aliases if (alias_slot := _alias(row, alias, original)) is not None]
    copies = list(globals_holding(original, row.reach)) if _may_be_copied(slot, original) else []
    known = {slot.place, *(alias.place for alias in declared)}
    return [*declared, *(copy for copy in copies if copy.place not in known)]


def _alias(row: Patch, path: str, original: Any) -> Slot | None:
    """The slot of a declared re-export; None while its module is not loaded, or has not got so far."""
    module = path.partition(":")[0]
    if module not in sys.modules:
        return None
    try:
        slot = locate(path)
        current = slot.read()
    except AttributeError:
        current = MISSING
    if current is MISSING:
        if is_loading(module):
            return None
        raise missing_symbol(row, path)
    if current is not original:
        raise EvenloadError(
            f"patch '{row.name}': {path} is no longer {row.target}",
            describe(current),
            "apply evenload before the other change, or take that change off; calls there would miss the patch",
        )
    return slot


def _is_foreign(copy: Slot, row: Patch) -> bool:
    own_packages = (row.module.partition(".")[0], __name__.partition(".")[0], *(row.reach or ()))
    return copy.path not in row.aliases and not within(copy.path.partition(":")[0], own_packages)
