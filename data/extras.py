"""Packages that only some formats need, imported when they are."""

from __future__ import annotations

import importlib
from typing import Any

from ..core.errors import EvenloadError


def require(module: str, purpose: str) -> Any:
    """Import ``module``; raise `EvenloadError` naming the pip extra where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise EvenloadError(f"{purpose} needs {package}", str(error), "pip install 'evenload[data]'") from error
