"""What all ranks recorded of a measured step, brought together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..core.simulate.step import Span
from ..runtime.world.agreement import everyone
from .bubbles import Place


def gather_spans(own: tuple[Span, ...]) -> list[Span]:
    """What all ranks recorded of a step, of tensor-parallel peers the first, without what is waiting. Collective."""
    return list(_shown(everyone(own)))


def _shown(ranks: Sequence[tuple[Span, ...]]) -> Iterator[Span]:
    """The spans of one rank for each (stage, plane rank), its tensor-parallel peers left out, without what is waiting.
    A collective begins when its last rank has come: the gradient sum of a stage, the update of all stages."""
    places: dict[Place, tuple[Span, ...]] = {}
    for spans in ranks:
        if spans:
            places.setdefault(spans[0][:2], spans)
    latest: dict[tuple[str, int], float] = {}
    for span in (span for spans in places.values() for span in spans):
        latest[_meeting(span)] = max(latest.get(_meeting(span), 0.0), span.start_s)
    for spans in places.values():
        for span in spans:
            together = span.kind in "GU"
            yield span._replace(start_s=min(latest[_meeting(span)], span.end_s)) if together else span


def _meeting(span: Span) -> tuple[str, int]:
    return span.kind, span.stage if span.kind == "G" else -1
