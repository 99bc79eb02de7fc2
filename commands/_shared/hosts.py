"""Which trainers there are, and whether this machine has the versions evenload was tested with."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet

from ...core.errors import EvenloadError


@dataclass(frozen=True)
class Requirement:
    """One distribution a trainer needs, and the versions its integration was tested with."""

    distribution: str
    supports: SpecifierSet

    def installed(self) -> str | None:
        """The installed version; None if there is none."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def satisfied(self) -> bool:
        version = self.installed()
        return version is not None and self.supports.contains(version, prereleases=True)


_TORCH = Requirement("torch", SpecifierSet(">=2.6"))
TRAINERS: dict[str, tuple[Requirement, ...]] = {
    "megatron": (_TORCH, Requirement("megatron-core", SpecifierSet(">=0.16.1,<0.17"))),
    "deepspeed": (
        _TORCH,
        Requirement("deepspeed", SpecifierSet(">=0.19,<0.20")),
        Requirement("transformers", SpecifierSet(">=5,<6")),
    ),
}


def require(trainer: str) -> None:
    """Raise EvenloadError unless everything the trainer needs is installed in a supported version."""
    for need in TRAINERS[trainer]:
        name, version, wanted = need.distribution, need.installed(), f"{need.distribution}{need.supports}"
        if version is None:
            do = f"pip install 'evenload[{trainer}]' (supported: {wanted})"
            raise EvenloadError(f"trainer '{trainer}' needs {name}", "it is not installed", do)
        if not need.satisfied():
            detail = f"{name} {version}; supported: {need.supports}"
            raise EvenloadError(f"this version of {name} is not supported", detail, f"pip install '{wanted}'")


def integration(trainer: str) -> Any:
    """The integration's package, imported now: ``open_host`` and ``reference`` are its public names."""
    return import_module(f"...integrations.{trainer}", __package__)
