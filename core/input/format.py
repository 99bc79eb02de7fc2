"""Bytes, shares and seconds as a person reads them."""

from __future__ import annotations

from datetime import timedelta

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
