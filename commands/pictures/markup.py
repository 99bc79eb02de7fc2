"""HTML that cannot be broken by what is put into it: every string is escaped unless it is markup already.

markupsafe would escape as well, but not write elements; what it could spare is the one line in `join`.
"""

from __future__ import annotations

from html import escape

Attribute = str | int | float | None


class Markup(str):
    """Text that is HTML."""


def tag(name: str, *inside: str, **attributes: Attribute) -> Markup:
    """An element. ``class_`` and ``aria_label`` become class and aria-label; None leaves an attribute out."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
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


def _plain(value: str | float) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)
