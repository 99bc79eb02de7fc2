"""Which version of a trainer this process imports: what its module says of itself, whatever pip lists.

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
        spec = _ask_finders(name, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _ask_finders(name: str, path: list[str] | None) -> ModuleSpec | None:
    with suppress(ImportError):
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path)
            if spec is not None:
                return spec
    return None
