"""Values as JSON that every reader takes: where arithmetic gave no finite number, null stands for it."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(value: Any, *, compact: bool = False) -> str:
    """``value`` as one line of JSON, NaN and infinities as null, paths and the like as text.

    ``compact``: without spaces, for large files.
    """
    separators = (",", ":") if compact else None
    try:
        return json.dumps(value, allow_nan=False, separators=separators, default=str)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=separators, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
