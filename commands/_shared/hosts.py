"""Which trainers there are, and whether this machine has the versions evenload was tested with."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from packaging.specifiers import SpecifierSet

from ...core.errors import EvenloadError
from ...integrations.versions import describe_version, is_installed, supported, version_of, what_to_install


@dataclass(frozen=True)
class Requirement:
    """One distribution a trainer needs, and the versions its integration was tested with."""

    distribution: str
    supports: SpecifierSet

    @property
    def wanted(self) -> str:
        """As pip takes it."""
        return f"{self.distribution}{self.supports}"

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


_NEEDS = {
    "megatron": ("torch", "megatron-core"),
    "deepspeed": ("torch", "deepspeed", "transformers"),
    "transformers": ("torch", "transformers", "accelerate"),
}
TRAINERS: dict[str, tuple[Requirement, ...]] = {
    trainer: tuple(Requirement(name, supported(name)) for name in names) for trainer, names in _NEEDS.items()
}
OWN_LOOP = ("megatron", "deepspeed")
"""The trainers that evenload's own training loop drives."""


def require(trainer: str) -> None:
    """Raise EvenloadError unless everything the trainer needs is installed in a supported version."""
    for need in TRAINERS[trainer]:
        if need.satisfied():
            continue
        if need.installed() is None:
            packages = " ".join(f"'{one.wanted}'" for one in TRAINERS[trainer] if one.installed() is None)
            what = f"trainer '{trainer}' needs {need.distribution}"
            raise EvenloadError(what, "it is not installed", f"pip install {packages}")
        detail = f"{describe_version(need.distribution)}; supported: {need.supports}"
        do = what_to_install(need.distribution, version_of(need.distribution), need.supports)
        raise EvenloadError(f"this version of {need.distribution} is not supported", detail, do)


def require_own_loop(trainer: str) -> None:
    """Raise EvenloadError for a trainer that runs its own loop alone, and where `require` does."""
    if trainer not in OWN_LOOP:
        do = "use `evenload run RECIPE -- COMMAND` with a script of yours, or trainer: " + " or ".join(OWN_LOOP)
        raise EvenloadError(f"evenload's own loop does not drive trainer {trainer}", f"trainer: {trainer}", do)
    require(trainer)


def integration(trainer: str) -> Any:
    """The integration's package, imported now: ``open_host`` and ``reference`` are its public names."""
    return import_module(f"...integrations.{trainer}", __package__)
