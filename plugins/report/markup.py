"""HTML that cannot be broken by what is put into it: every string is escaped unless it is markup already.

markupsafe would escape as well, but not write elements; what it could spare is the one line in `join`.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ...core.input.format import gib, percent, seconds


class Markup(str):
    """Text that is HTML already, and is not escaped again."""


def tag(name: str, *inside: str, **attributes: str | float | None) -> Markup:
    """An element. ``class_`` and ``aria_label`` become class and aria-label; None leaves an attribute out."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(f"{value:.7g}" if isinstance(value, float) else str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{named}>{join(*inside)}</{name}>")


def join(*parts: str) -> Markup:
    """Parts one after the other."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def number(value: float, text: str) -> Markup:
    """A number as people read it, with the exact one for programs."""
    return tag("data", text, value=repr(value))


def duration(value: float) -> Markup:
    return number(value, seconds(value))


def factor(ratio: float) -> Markup:
    return number(ratio, f"{ratio:.2f}x")


def share(value: float) -> Markup:
    return number(value, percent(value))


def size(num_bytes: float) -> Markup:
    return number(num_bytes, gib(num_bytes))


def section(name: str, title: str, *content: str) -> Markup:
    return tag("section", tag("h2", title), *content, id=name)


def say(text: str) -> Markup:
    """A paragraph that explains what stands next to it."""
    return tag("p", text, class_="say")


def figures(numbers: Mapping[str, Markup]) -> Markup:
    """Numbers with their names, side by side."""
    pairs = (tag("div", tag("dt", name), tag("dd", value)) for name, value in numbers.items())
    return tag("dl", *pairs, class_="facts")
