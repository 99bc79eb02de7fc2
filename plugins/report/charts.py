"""Charts as HTML: shapes in SVG that stretches with the page, text next to it, so that no text ever shrinks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...core.input.format import seconds
from .facts import FOOT, PARTS, Part, Stretch
from .markup import Markup, tag

WIDTH = 1000.0
"""Units across a chart; they stretch."""

_MOST_PIECES = 1500
"""Of a timeline with a tooltip each; beyond, a rank's pieces of a kind are one shape."""


class Bar(NamedTuple):
    """A horizontal bar with its label and value."""

    label: str
    note: str
    value: Markup
    segments: Sequence[tuple[str, float, str, str]]
    """(CSS class, length, tooltip, text inside) from left to right."""
    strong: bool = False


class TimelineRow(NamedTuple):
    """A rank of a timeline."""

    name: str
    pieces: Sequence[Stretch]
    first_of_group: bool = False
    """Begins a group of rows (the stages of a rank)."""


def legend(keys: Mapping[str, str]) -> Markup:
    """What colours mean, by CSS class."""
    return tag("ul", *(tag("li", tag("i", class_=f"key {key}"), text) for key, text in keys.items()), class_="legend")


def time_legend(parts: Iterable[Part], bound_s: float) -> Markup:
    return legend({part: PARTS[part] for part in parts} | {"bound": f"lower bound, {seconds(bound_s)}"})


def bars(rows: Sequence[Bar], most: float, mark: float) -> Markup:
    """Bars on one scale from 0 to ``most``; ``mark`` is a dashed line through all."""
    return tag("div", *(_bar(row, most, mark) for row in rows), class_="bars")


def _bar(row: Bar, most: float, mark: float) -> Markup:
    shapes, inside, at = [], [], 0.0
    for name, length, title, text in row.segments:
        if length <= 0:
            continue
        left, width = at / most * WIDTH, length / most * WIDTH
        shapes.append(tag("rect", tag("title", title), class_=name, x=left, y=2, width=width, height=20))
        if text:
            inside.append(tag("span", text, class_=f"in {name}", style=_left(at + length / 2, most)))
        at += length
    shapes.append(_line(mark / most * WIDTH, 24))
    note = [tag("small", row.note)] if row.note else []
    label = tag("div", tag("b", row.label) if row.strong else row.label, *note, class_="label")
    plot, value = tag("div", _svg(24, shapes), *inside, class_="plot"), tag("div", row.value, class_="value")
    return tag("div", label, plot, value, class_="bar strong" if row.strong else "bar")


def timeline(
    rows: Sequence[TimelineRow], step_s: float, most_s: float, bound_s: float, ends: tuple[str, str]
) -> Markup:
    """Ranks from top to bottom, time from left to right; what is empty waits. ``ends`` name the first and last row."""
    groups = sum(row.first_of_group for row in rows[1:])
    height = max(5, min(18, 216 // len(rows)))
    gap = 3 if groups else 0
    total = height * len(rows) + gap * groups
    each = sum(len(row.pieces) for row in rows) <= _MOST_PIECES
    inset = 1 if height > 6 else 0.5
    shapes, y = [], 0.0
    for place, row in enumerate(rows):
        y += gap if place and row.first_of_group else 0
        top, size = y + inset, height - 2 * inset
        waits = step_s - sum(piece.length_s for piece in row.pieces)
        title = f"{row.name}: waits {waits / step_s:.0%} of the step" if step_s else row.name
        width = step_s / most_s * WIDTH
        shapes.append(tag("rect", tag("title", title), class_="waiting", x=0, y=top, width=width, height=size))
        shapes += _pieces(row, most_s, top, size) if each else _merged(row, most_s, top, size)
        y += height
    shapes.append(_line(bound_s / most_s * WIDTH, total))
    gutter = (tag("span", end) for end in (ends[:1] if len(rows) == 1 else dict.fromkeys(ends)))
    plot = tag("div", _svg(total, shapes), class_="plot")
    return tag("div", tag("div", *gutter, class_="gutter"), plot, class_="ranks")


def _pieces(row: TimelineRow, most_s: float, top: float, size: float) -> list[Markup]:
    wide = len(row.pieces) <= 40
    shapes = []
    for piece in row.pieces:
        title = tag("title", f"{row.name}: {piece.title}")
        box = {"x": piece.start_s / most_s * WIDTH, "width": piece.length_s / most_s * WIDTH}
        part = f"{piece.part} edged" if wide else piece.part
        shapes.append(tag("rect", title, class_=part, y=top, height=size, **box))
        if piece.again > 0:
            low = size * FOOT * piece.again
            shapes.append(tag("rect", title, class_="again", y=top + size - low, height=low, **box))
    return shapes


def _merged(row: TimelineRow, most_s: float, top: float, size: float) -> list[Markup]:
    shapes = []
    for part in PARTS:
        of_part = [piece for piece in row.pieces if piece.part == part]
        if not of_part:
            continue
        shape = "".join(
            f"M{piece.start_s / most_s * WIDTH:.2f} {top:g}h{piece.length_s / most_s * WIDTH:.2f}"
            f"v{size:g}H{piece.start_s / most_s * WIDTH:.2f}z"
            for piece in of_part
        )
        taken = sum(piece.length_s for piece in of_part)
        title = f"{row.name}: {PARTS[part]}, {taken:.3g} s in {len(of_part)} stretches"
        shapes.append(tag("path", tag("title", title), class_=part, d=shape))
    return shapes


def columns(shares: Sequence[float], class_: str, titles: Sequence[str]) -> Markup:
    """A histogram: one column a bin, the tallest with its share above it."""
    most, width = max(shares), WIDTH / len(shares)
    shapes = []
    for place, (share, title) in enumerate(zip(shares, titles, strict=True)):
        if share > 0:
            high = 60 * share / most
            box = {"x": place * width + 0.06 * width, "y": 60 - high, "width": 0.88 * width, "height": high}
            shapes.append(tag("rect", tag("title", title), class_=class_, **box))
    top = max(range(len(shares)), key=shares.__getitem__)
    shapes.append(tag("path", class_="base", d=f"M0 60H{WIDTH:g}"))
    peak = tag("span", f"{shares[top]:.0%}", class_="peak", style=_left(top + 0.5, len(shares)))
    return tag("div", peak, _svg(60, shapes), class_="plot columns")


def axis(labels: Sequence[tuple[float, str]], most: float) -> Markup:
    """Labels below a chart at their places from 0 to ``most``."""
    spans = []
    for at, text in labels:
        side = "first" if at / most < 0.04 else "last" if at / most > 0.96 else ""
        spans.append(tag("span", text, class_=side or None, style=_left(at, most)))
    return tag("div", *spans, class_="axis")


def ticks(most: float) -> list[float]:
    """Round numbers from 0 up to ``most``, about four."""
    rough = most / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [k * step for k in range(int(most / step * (1 + 1e-9)) + 1)]


def _svg(height: float, shapes: Sequence[str]) -> Markup:
    box = {"viewBox": f"0 0 {WIDTH:g} {height:g}", "preserveAspectRatio": "none"}
    return tag("svg", *shapes, **box, style=f"height:{height:g}px", focusable="false")


def _line(x: float, height: float) -> Markup:
    return tag("path", tag("title", "lower bound"), class_="mark", d=f"M{x:.2f} 0V{height:g}")


def _left(at: float, most: float) -> str:
    return f"left:{100 * at / most:.3f}%"
