"""Values as text: bytes, shares and seconds as a person reads them, and JSON that every reader takes.

Where arithmetic gave no finite number, null stands for it in JSON.
"""

from __future__ import annotations

import json
import math
from datetime import timedelta
from typing import Any

GIB = 1 << 30


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def gib(num_bytes: float) -> str:
    size = num_bytes / GIB
    return f"{size:.0f} GiB" if size >= 100 else f"{size:.3g} GiB" if size >= 1 else f"{1024 * size:.0f} MiB"


def mib(num_bytes: float) -> str:
    """Bytes as text in MiB, for what may be small."""
    return f"{1024 * num_bytes / GIB:,.3g} MiB"


def clock(value_s: float) -> str:
    """Seconds as hours, minutes and seconds: 1:02:03."""
    return str(timedelta(seconds=round(value_s)))


def seconds(value: float) -> str:
    """Seconds with a unit that fits."""
    if value >= 1:
        return f"{value:,.0f} s" if value >= 1000 else f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"


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
