"""Which versions of trainers are supported, and which one this process imports: what its module says of itself,
whatever pip lists.

    loaded              the module's ``__version__``
    not loaded yet      the distribution's, where its files are those that the import would find
    other files found   not known before the import: a checkout on PYTHONPATH, an editable installation

A package is called as its distribution with dots for dashes: megatron-core holds megatron.core. Nothing is imported.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

SUPPORTED = {
    "torch": ">=2.9,<3",
    "megatron-core": ">=0.16.1,<0.20",
    "deepspeed": ">=0.19.6,<0.20",
    "transformers": ">=5,<6",
    "accelerate": ">=1,<2",
}
"""Distributions and their versions: the one place that says so, for rows, doctor and messages."""
FOR_FOLDERS = ("torch", "transformers")
"""What folders of weights and adapters need, under any trainer."""


def supported(distribution: str) -> SpecifierSet:
    """The versions of a distribution that evenload works with."""
    return SpecifierSet(SUPPORTED[distribution])


def requirement(distribution: str) -> str:
    """``megatron-core >=0.16.1,<0.20``, as rows name it."""
    return f"{distribution} {SUPPORTED[distribution]}"


def what_to_install(distribution: str, version: str | None, supports: SpecifierSet) -> str:
    """What to do about a version that is not supported; nobody is sent back to an older one."""
    install = f"pip install '{distribution}{supports}'"
    if not _is_newer(version, supports):
        return install
    return (
        f"install a version of evenload that supports {version}, or give evenload an environment of its own, in which "
        f"{install}"
    )


def _is_newer(version: str | None, supports: SpecifierSet) -> bool:
    ends = [Version(one.version) for one in supports if one.operator.startswith("<")]
    try:
        return version is not None and any(Version(version) >= end for end in ends)
    except InvalidVersion:
        return False


def is_installed(distribution: str) -> bool:
    """Whether there is such a distribution, or its package can be imported without one."""
    return listed_version(distribution) is not None or _folder(distribution) is not None


def version_of(distribution: str) -> str | None:
    """The version that this process imports; None where it is not known before the import, or not installed."""
    loaded = _loaded_version(distribution)
    if loaded is not None:
        return loaded
    folder, listed = _folder(distribution), listed_version(distribution)
    if folder is None or listed is None:
        return listed
    with suppress(metadata.PackageNotFoundError):
        place = metadata.distribution(distribution).locate_file(distribution.replace("-", "/"))
        if Path(str(place)).resolve() == folder.resolve():
            return listed
    return None


def describe_version(distribution: str) -> str:
    """``megatron-core 0.16.1``; where pip lists another version or none, that too, and where the module lies."""
    version, listed, folder = version_of(distribution), listed_version(distribution), _folder(distribution)
    if version is None and folder is None:
        return f"{distribution} is not installed"
    if version == listed:
        return f"{distribution} {version}"
    return f"{distribution} {version or 'of unknown version'} in {folder}; pip lists {listed or 'none'}"


def listed_version(distribution: str) -> str | None:
    """What pip lists; None: nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _loaded_version(distribution: str) -> str | None:
    """What the loaded package says; None where it is not loaded, or its body has not come so far."""
    package = distribution.replace("-", ".")
    modules: list[Any] = [sys.modules.get(name) for name in (package, f"{package}.package_info")]
    return next((str(one.__version__) for one in modules if hasattr(one, "__version__")), None)


def _folder(distribution: str) -> Path | None:
    """Where the package lies that is loaded, or that an import would find; None: nowhere."""
    package = distribution.replace("-", ".")
    spec = getattr(sys.modules.get(package), "__spec__", None) or _find(package)
    if spec is None:
        return None
    places = [*(spec.submodule_search_locations or ()), spec.origin]
    return next((Path(place) for place in places if place), None)


def _find(package: str) -> ModuleSpec | None:
    """The package's spec without an import of its parents, which `importlib.util.find_spec` makes."""
    path: list[str] | None = None
    name, spec = "", None
    for part in package.split("."):
        name = f"{name}.{part}".lstrip(".")
        try:
            specs = (finder.find_spec(name, path) for finder in list(sys.meta_path))
            spec = next(filter(None, specs), None)
        except ImportError:
            return None
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec
