"""The product's own modules, parsed once."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import evenload

ROOT = Path(evenload.__file__).parent
ROOMS = ("commands", "core", "data", "integrations", "patches", "plugins", "recipes", "runtime", "training")


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Its modules by their paths under the root."""
    paths = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}
