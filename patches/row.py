"""A patch as a row of data, and the guards that can be judged from the row and the symbol alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ..core.errors import EvenloadError
from ..integrations.host.versions import describe_version, is_installed, listed_version, version_of, what_to_install
from .slots import foreign_owner

Wrapper = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


def from_module(path: str, *last: Any) -> Callable[..., Any]:
    """The function ``module:name``, looked up in every call, so that rows need no trainer; ``last`` are added to it."""
    module, _, name = path.partition(":")

    def call(*arguments: Any) -> Any:
        return getattr(import_module(module, __package__), name)(*arguments, *last)

    return call


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One upstream symbol and what takes its place. Exactly one of ``wrapper`` and ``replace`` is given."""

    name: str
    """What messages and tables call the row; together with ``target`` it identifies the row."""
    target: str
    """``module:name``, ``module:Class.name`` or ``module:mapping[key]``."""
    supports: str
    """A requirement, ``megatron-core >=0.16.1,<0.17``, checked against the module that is imported."""
    why: str
    """Which callers it reaches, why this layer and not another, what is left alone."""
    wrapper: Wrapper | None = None
    """``wrapper(wrapped, instance, args, kwargs)``, called in place of the symbol."""
    replace: Callable[[Any], Any] | None = None
    """``replace(original)`` returns the new value, made when the row is applied."""
    expects: tuple[str, ...] | None = None
    """Parameter names that the symbol must still have; None where there is no signature to read."""
    aliases: tuple[str, ...] = ()
    """Re-exports that callers are known to use. Once their module is loaded they must still be the same object."""
    reach: tuple[str, ...] | None = None
    """Packages in which ``from module import name`` copies are rebound too: None means everywhere, () nowhere."""
    fills_gap: bool = False
    """The symbol is missing upstream; where it is present the row has nothing to do."""
    owner: str | None = None
    """Package whose own code must be found at the target: for a row that may take its place, not only wrap it."""
    when: Callable[[], bool] | None = None
    """The row is needed only where this holds; asked when the row is applied."""
    only: str = ""
    """Which of the supported versions need the row, ``>=0.18``; in the others there is nothing to do."""

    def __post_init__(self) -> None:
        assert (self.wrapper is None) != (self.replace is None), f"{self.name}: give wrapper or replace"
        assert ":" in self.target, f"{self.name}: the target reads module:name"
        assert not (self.wrapper and self.fills_gap), f"{self.name}: there is nothing to wrap in a gap"

    @property
    def module(self) -> str:
        """Name of the module whose import makes the row applicable."""
        return self.target.partition(":")[0]

    @property
    def identity(self) -> tuple[str, str]:
        return self.name, self.target


def is_needed_by_version(row: Patch) -> bool:
    """Whether the version that is imported needs the row; one that is not known yet may."""
    version = version_of(Requirement(row.supports).name) if row.only else None
    return version is None or SpecifierSet(row.only).contains(version, prereleases=True)


def check_version(row: Patch) -> None:
    """Raise `EvenloadError` where the version that is imported is known and not supported; imports nothing.

    A package that lies elsewhere than its distribution, or has none, is known by its own word alone: its rows pass
    here until it is loaded, and are asked again when they are put on.
    """
    needs = Requirement(row.supports)
    what, install = f"patch '{row.name}' is made for {row.supports}", f"pip install '{needs.name}{needs.specifier}'"
    version = version_of(needs.name)
    if version is None:
        if is_installed(needs.name):
            return
        raise EvenloadError(what, describe_version(needs.name), f"{install}, or leave the patch out")
    if not needs.specifier.contains(version, prereleases=True):
        do = what_to_install(needs.name, version, needs.specifier)
        if (listed := listed_version(needs.name)) is not None and needs.specifier.contains(listed, prereleases=True):
            do = f"take that folder off PYTHONPATH, so that {listed} is imported"
        raise EvenloadError(what, describe_version(needs.name), do)


def check_signature(row: Patch, value: Any) -> None:
    """Raise `EvenloadError` unless ``value`` still has every parameter that the row counts on."""
    if row.expects is None:
        return
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError) as error:
        raise EvenloadError(
            f"patch '{row.name}': {row.target} has no signature to check", str(error), _report(row)
        ) from error
    lost = [name for name in row.expects if name not in signature.parameters]
    if lost:
        raise EvenloadError(
            f"patch '{row.name}': {row.target} no longer takes {', '.join(lost)}",
            f"{row.target.partition(':')[2]}{signature} in {describe_version(Requirement(row.supports).name)}",
            _report(row),
        )


def check_owner(row: Patch, value: Any) -> None:
    """Raise `EvenloadError` if somebody else has replaced or wrapped what the row would take the place of."""
    who = foreign_owner(value, row.owner) if row.owner else ""
    if who:
        raise EvenloadError(
            f"patch '{row.name}': {row.target} is already patched by someone else, whom this row would cut off",
            who,
            "take that change off, or apply it after evenload is enabled: it then goes around evenload's",
        )


def missing_symbol(row: Patch, path: str) -> EvenloadError:
    """The error for a symbol that upstream has moved or removed."""
    return EvenloadError(
        f"patch '{row.name}': {path} does not exist", describe_version(Requirement(row.supports).name), _report(row)
    )


def _report(row: Patch) -> str:
    return f"install a version within {row.supports}; if yours is, report that {row.target} has changed"
