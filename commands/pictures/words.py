"""How numbers and headings are put on the page."""

from __future__ import annotations

from ...core.plan.limits import GIB as GIB
from .._shared.show import seconds
from .markup import Markup, number, tag


def section(name: str, title: str, *content: str) -> Markup:
    return tag("section", tag("h2", title), *content, id=name)


def counted(many: int, what: str) -> str:
    return f"{many:,} {what}{'' if many == 1 else 's'}"


def duration(value: float) -> Markup:
    return number(value, seconds(value))


def factor(ratio: float) -> Markup:
    return number(ratio, f"{ratio:.2f}x")


def gib(num_bytes: float) -> str:
    size = num_bytes / GIB
    return f"{size:.0f} GiB" if size >= 100 else f"{size:.3g} GiB" if size >= 1 else f"{1024 * size:.0f} MiB"
