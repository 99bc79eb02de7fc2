"""A Chrome trace: what every rank does when, one process a planner, one thread a rank; ui.perfetto.dev opens it.

Arrows lead from a pass to the one of the next stage that takes what it hands over: hidden states of a forward,
gradients of a backward; where that would be too many events there are none. A step's own event tells its bubble, and
that of every rank.

Written in the Trace Event Format ("Trace Event Format", Google, sections "Complete Events", "Metadata Events" and "Flow
Events"): times in microseconds, to the nanosecond, so that neighbours on a thread never overlap.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ...core.input.format import to_json
from ...core.plan.step_plan import StepPlan
from ...core.simulate.step import SPAN_KINDS, Span
from ..files import open_text, whole
from ..forecast.forecast import Forecast
from ..pipelines import Place, bubbles_of, by_place, name_of, on_devices, recomputed
from .planners import about, label, names, planners

logger = logging.getLogger("evenload")

MOST_EVENTS = 400_000
"""Viewers become slow beyond; a trace of more shows every second, third ... rank."""

_MOST_TOLD = 64
"""Ranks of all stages whose bubbles a step's event lists."""

_MOST_CHUNKS = 8
"""Chunks that the event of a pass lists."""

_COLOURS = {
    "F": "thread_state_running",
    "R": "thread_state_runnable",
    "B": "rail_response",
    "W": "rail_animation",
    "C": "bad",
    "G": "thread_state_iowait",
    "U": "rail_load",
}
"""Reserved colour names of chrome://tracing; Perfetto colours by name of the event."""

_HANDED: dict[str, tuple[str, int]] = {"F": ("hidden states", 1), "B": ("gradients", -1)}
"""What goes to which neighbour stage after a pass."""

_INSIDE_S = 2e-9
"""An arrow begins this long before the end of its pass: viewers look for the event around it."""


class Track(NamedTuple):
    """One step of one planner."""

    name: str
    """The process that it is shown in; several tracks of one name are its steps, one after the other."""
    plan: StepPlan
    spans: Sequence[Span]
    begin_s: float = 0.0
    """Where the step begins on the time axis."""


class _Thread(NamedTuple):
    pid: int
    tid: int


_STEP: Place = (-1, -1)
"""Where a process has the thread of its whole steps."""


def write(forecast: Forecast, path: Path) -> None:
    """Write what a plan predicts. Raises EvenloadError."""
    write_trace(path, tracks_of(forecast), about(forecast))


def tracks_of(forecast: Forecast) -> list[Track]:
    """All steps of all planners, a planner's steps without gaps."""
    tracks = []
    for name in names(forecast):
        begin_s = 0.0
        for one in (planners(step)[name] for step in forecast.steps):
            tracks.append(Track(f"{label(name)}, predicted", one.plan, one.outcome.spans, begin_s))
            begin_s += one.outcome.step_s
    return tracks


def write_trace(path: Path, tracks: Sequence[Track], about: Mapping[str, Any]) -> None:
    """Write the tracks, compressed if the name ends with .gz. ``about``: its ``otherData``. Raises EvenloadError."""
    every = math.ceil(sum(len(track.spans) for track in tracks) / MOST_EVENTS) or 1
    shown = "all ranks"
    if every > 1:
        some = f"rank 0, {every}, {2 * every} ... and the last to finish of each stage and step"
        shown = f"{some}: too many events for all"
        logger.warning("%s shows %s", path, shown)
    with whole(path) as part, open_text(part, path) as file:
        head = to_json({**about, "ranks shown": shown}, compact=True)
        file.write(f'{{"displayTimeUnit":"ms","otherData":{head},"traceEvents":[')
        for number, event in enumerate(_events(tracks, every)):
            file.write(f"{',' if number else ''}\n{event}")
        file.write("\n]}\n")


def _events(tracks: Sequence[Track], every: int) -> Iterator[str]:
    threads_of: dict[str, dict[Place, _Thread]] = {}
    steps = Counter[str]()
    numbers = count(1)
    # Each pass that hands over has two events of an arrow besides its own.
    arrows = 3 * sum(len(track.spans) for track in tracks) <= MOST_EVENTS
    for track in tracks:
        limits, threads = track.plan.limits, threads_of.setdefault(track.name, {})
        pid = list(threads_of).index(track.name) + 1
        if not threads:
            yield from _named("process", _Thread(pid, 0), track.name, pid)
            if every > 1:
                yield _meta("process_labels", _Thread(pid, 0), labels=f"every {every}th rank")
            threads[_STEP] = _Thread(pid, next(numbers))
            yield from _named("thread", threads[_STEP], "step", 0)
        yield _whole_step(track, steps[track.name], threads[_STEP])
        steps[track.name] += 1
        wanted, args = _wanted(track, every), args_of(track.plan)
        for place, spans in by_place(track.spans):
            if place not in wanted:
                continue
            if place not in threads:
                threads[place] = _Thread(pid, next(numbers))
                order = 1 + place[0] * limits.num_ranks + place[1]
                yield from _named("thread", threads[place], name_of(place, limits.num_stages), order)
            yield from _of_rank(track, threads[place], spans, args)
        if arrows:
            yield from _hand_overs(track, threads, numbers)


def _of_rank(
    track: Track, thread: _Thread, spans: Iterator[Span], args: Callable[[str, int, int], str]
) -> Iterator[str]:
    kind_of_pass = "F"
    for span in spans:
        if span.kind in "FRBW":
            kind_of_pass = "F" if span.kind == "F" else "B"
        name = kind = SPAN_KINDS[span.kind]
        more = ""
        if span.micro_batch >= 0:
            name += f" {span.micro_batch}"
            more = args(kind_of_pass, span.micro_batch, span.stage if track.plan.recompute else 0)
        named = f'"cat":"{kind}","cname":"{_COLOURS[span.kind]}","name":"{name}"{more}'
        yield f"{{{_lasting(thread, track, span.start_s, span.end_s)},{named}}}"


def _hand_overs(track: Track, threads: Mapping[Place, _Thread], numbers: Iterator[int]) -> Iterator[str]:
    """An arrow from each pass to the same one at the stage that waits for it; none in a V, whose stages are not told
    apart where they were measured."""
    known = {(span.kind, span.micro_batch, span.stage, span.rank): span for span in track.spans}
    limits = track.plan.limits
    for span in track.spans if limits.num_stages > 1 and not limits.v_shape else ():
        if span.kind not in _HANDED or span.micro_batch < 0:
            continue
        what, towards = _HANDED[span.kind]
        taker = known.get((span.kind, span.micro_batch, span.stage + towards, span.rank))
        if taker is not None:
            name = f'"cat":"hand-over","name":"{what}","id":{next(numbers)}'
            leaves_s, arrives_s = max(span.start_s, span.end_s - _INSIDE_S), taker.start_s
            for phase, end, at_s in (("s", span, leaves_s), ("f", taker, arrives_s)):
                (pid, tid), at = threads[end[:2]], round((track.begin_s + at_s) * 1e9)
                ends = ',"bp":"e"' if phase == "f" else ""
                yield f'{{"ph":"{phase}","pid":{pid},"tid":{tid},"ts":{_us(at)},{name}{ends}}}'


def _whole_step(track: Track, number: int, thread: _Thread) -> str:
    end_s = max((span.end_s for span in track.spans), default=0.0)
    args = {
        "sequences": len(track.plan.lengths),
        "tokens": track.plan.num_tokens,
        "padding": round(track.plan.padding_frac, 4),
        "made by": track.plan.made_by,
        **tell_bubbles(track.plan, track.spans),
    }
    named = f'"cat":"step","name":"step {number}","args":{to_json(args, compact=True)}'
    return f"{{{_lasting(thread, track, 0.0, end_s)},{named}}}"


def _wanted(track: Track, every: int) -> set[Place]:
    """(stage, rank) that are shown: every n-th rank, and the last to finish of each stage."""
    last: dict[int, tuple[float, int]] = {}
    for span in track.spans if every > 1 else ():
        if span.micro_batch >= 0:
            last[span.stage] = max(last.get(span.stage, (0.0, 0)), (span.end_s, span.rank))
    limits = track.plan.limits
    shown = {(stage, rank) for stage in range(limits.num_stages) for rank in range(0, limits.num_ranks, every)}
    return shown | {(stage, rank) for stage, (_, rank) in last.items()}


def _lasting(thread: _Thread, track: Track, start_s: float, end_s: float) -> str:
    start, end = round((track.begin_s + start_s) * 1e9), round((track.begin_s + end_s) * 1e9)
    return f'"ph":"X","pid":{thread.pid},"tid":{thread.tid},"ts":{_us(start)},"dur":{_us(end - start)}'


def _us(nanoseconds: int) -> str:
    sign, size = ("-" if nanoseconds < 0 else ""), abs(nanoseconds)
    return f"{sign}{size // 1000}.{size % 1000:03d}"


def _named(what: str, thread: _Thread, name: str, sort_index: int) -> Iterator[str]:
    yield _meta(f"{what}_name", thread, name=name)
    yield _meta(f"{what}_sort_index", thread, sort_index=sort_index)


def _meta(kind: str, thread: _Thread, **args: Any) -> str:
    return to_json({"ph": "M", **thread._asdict(), "name": kind, "args": args}, compact=True)


def args_of(plan: StepPlan) -> Callable[[str, int, int], str]:
    """Gives the ``args`` of the events of a micro-batch in a direction at a stage as JSON, each made once."""
    lengths = plan.lengths.tolist()

    @cache
    def args_of_pass(kind: str, number: int, stage: int) -> str:
        micro_batch = plan.passes("B" if kind == "B" else "F")[number]
        args: dict[str, Any] = {
            "micro-batch": number,
            "tokens": micro_batch.num_tokens,
            "slices": len(micro_batch.slices),
            "longest slice": max((s.length for s in micro_batch.slices), default=0),
        }
        if len(micro_batch.ranks) > 1:
            args["on ranks"] = len(micro_batch.ranks)
        if micro_batch.num_padded_tokens > micro_batch.num_tokens:
            args["padding"] = round(1 - micro_batch.num_tokens / micro_batch.num_padded_tokens, 4)
        chunks = [s for s in micro_batch.slices if s.length < lengths[s.sequence]]
        if chunks:
            shown = [f"{s.start} to {s.stop} of sequence {s.sequence}" for s in chunks[:_MOST_CHUNKS]]
            args["chunks"] = "; ".join(shown + ["..."] * (len(chunks) > _MOST_CHUNKS))
        if plan.recompute:
            args["layers recomputed"] = recomputed(plan, stage, number)
        return f',"args":{to_json(args, compact=True)}'

    return args_of_pass


def tell_bubbles(plan: StepPlan, spans: Sequence[Span]) -> dict[str, float]:
    """Bubbles of the step, then of its ranks, where they are not too many to read."""
    bubbles = bubbles_of([on_devices(spans, plan.limits)])
    args = {"bubble": round(bubbles.frac, 4)}
    if len(bubbles.waits) <= _MOST_TOLD:
        for place in sorted(bubbles.waits):
            args[f"bubble of {name_of(place, plan.limits.num_stages)}"] = round(bubbles.of(*place), 4)
    return args
