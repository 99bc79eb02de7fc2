"""Which trainers there are, and whether this machine has the versions evenload was tested with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from packaging.specifiers import SpecifierSet

from ..core.errors import EvenloadError
from ..core.recipe.traits import trainer_called, trainers_with
from ..integrations.host.versions import (
    FOR_FOLDERS,
    SUPPORTED,
    describe_version,
    is_installed,
    supported,
    version_of,
    what_to_install,
)


@dataclass(frozen=True)
class Requirement:
    """One distribution a trainer needs, and the versions its integration was tested with."""

    distribution: str
    supports: SpecifierSet

    def installed(self) -> str | None:
        """The version that an import would find; where only the import can tell, that it is of unknown version; None if
        there is none."""
        if not is_installed(self.distribution):
            return None
        return version_of(self.distribution) or describe_version(self.distribution)

    def satisfied(self) -> bool:
        """Whether it is installed, and not known to be of another version: an import may have to tell."""
        version = version_of(self.distribution)
        if version is None:
            return is_installed(self.distribution)
        return self.supports.contains(version, prereleases=True)


def needs_of(trainer: str) -> tuple[Requirement, ...]:
    """What a trainer needs, torch first."""
    return tuple(Requirement(name, supported(name)) for name in ("torch", *trainer_called(trainer).packages))


def require(trainer: str) -> None:
    """Raise EvenloadError unless everything the trainer needs is installed in a supported version."""
    needs = needs_of(trainer)
    for need in needs:
        if need.satisfied():
            continue
        if need.installed() is None:
            wanted = [*(one.distribution for one in needs), *trainer_called(trainer).beside]
            what = f"trainer '{trainer}' needs {need.distribution}"
            raise EvenloadError(what, "it is not installed", _install(wanted, trainer))
        detail = f"{describe_version(need.distribution)}; supported: {need.supports}"
        do = what_to_install(need.distribution, version_of(need.distribution), need.supports)
        raise EvenloadError(f"this version of {need.distribution} is not supported", detail, do)


def require_for_folders(what: str) -> None:
    """Raise EvenloadError unless torch and Transformers are installed, which not every trainer needs."""
    if missing := [one for one in FOR_FOLDERS if not is_installed(one)]:
        extra = trainers_with(lambda row: {*FOR_FOLDERS} <= {"torch", *row.packages, *row.beside})[0]
        raise EvenloadError(f"{what} needs {missing[0]}", "it is not installed", _install(missing, extra))


def _install(distributions: Iterable[str], extra: str) -> str:
    """The line that installs those of them that are not here."""
    missing = [one for one in distributions if not is_installed(one)]
    packages = " ".join(f"'{one}{supported(one)}'" if one in SUPPORTED else one for one in missing)
    return f"pip install {packages}: the rest of the extra evenload[{extra}]"


def require_own_loop(trainer: str) -> None:
    """Raise EvenloadError for a trainer that runs its own loop alone, and where `require` does."""
    if not trainer_called(trainer).host:
        driven = " or ".join(trainers_with(lambda row: row.host))
        do = f"use `evenload run RECIPE -- COMMAND` with a script of yours, or trainer: {driven}"
        raise EvenloadError(f"evenload's own loop does not drive trainer {trainer}", f"trainer: {trainer}", do)
    require(trainer)


def integration(trainer: str) -> Any:
    """The integration's package, imported now: ``open_host`` and ``reference`` are its public names."""
    return import_module(trainer_called(trainer).host)
