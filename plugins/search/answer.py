"""What a search says: the best settings and their certificate, and what holds the others back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np

from ...core.costs.by_setting import unmeasured
from ...core.errors import EvenloadError
from ...core.machine.layout import Layout
from ...core.planning.judge import outcome_of
from .best_first import LACKS, Played, SearchState
from .space import CAP, Space

MOST_ROWS = 10

Result = dict[str, Any]

BY_HAND: tuple[tuple[float, tuple[tuple[int, int], ...]], ...] = (
    (1e9, ((1, 1),)),
    (1e10, ((2, 1), (4, 1))),
    (7e10, ((4, 2), (8, 2), (4, 4), (8, 4))),
    (2e11, ((8, 4), (8, 8))),
)
"""(Weights up to, (tp, pp) each) of the rules that guides for large models give; larger ones: the last row."""


def answer(search: SearchState, space: Space, weights: int) -> Result:
    """Everything that is known at this moment, the best first; all seconds are predicted.

    ``weights``: of the model. Raises EvenloadError where no setting can run.
    """
    best = search.best
    if best is None and not search.left:
        raise _nothing_fits(search)
    known = ranked(search)
    rows = [_row(one, known[0]) for one in distinct(known)[:MOST_ROWS]]
    return {
        "predicted": True,
        "ranks": search.played[0].choice.chain.context.layout.world_size,
        "batches": len(search.played[0].floors_s),
        "gap": None if best is None else search.gap,
        "settings": len(space.choices) + len(space.refused),
        "planned": sum(bool(one.steps) for one in search.played),
        "by_bound": sum(not one.steps and not one.out for one in search.played),
        "by_memory": sum(one.out == LACKS for one in search.played),
        "refused": len(space.refused),
        "activations_counted": search.played[0].choice.chain.context.costs.memory.activation_bytes_per_token > 0,
        "rows": rows,
        "not_measured": sorted({note for row in rows for note in unmeasured(row["costs"])}),
        "axes": _lines(search, space, known),
        "layouts": _layouts(known, weights),
        "more_memory": _more_memory(search, best),
    }


def ranked(search: SearchState) -> list[Played]:
    """The settings that were planned whole and can run, the fastest first."""
    return sorted((one for one in search.played if one.whole and not one.out), key=lambda one: one.mean_s)


def distinct(known: Sequence[Played]) -> list[Played]:
    """The first of all settings with the same plans that take the same time."""
    first: dict[tuple[object, ...], Played] = {}
    for one in known:
        first.setdefault((one.mean_s, *(step.plan.digest for step in one.steps)), one)
    return list(first.values())


def _nothing_fits(search: SearchState) -> EvenloadError:
    lacking = [one for one in search.played if one.out == LACKS]
    if not lacking:
        return EvenloadError("no setting can be planned", search.played[0].out, "pin less, or another --nproc")
    least = min(lacking, key=lambda one: one.lacking_bytes)
    detail = f"{said(least.choice.values)} lacks least, {least.lacking_bytes / 2**30:.3g} GiB on each device"
    return EvenloadError("no setting fits into the devices", detail, "more ranks (--nproc) or memory (--memory)")


def _row(one: Played, best: Played) -> Result:
    outcomes = [outcome_of(step.plan, one.choice.chain.context) for step in one.steps]
    tokens = sum(step.plan.num_tokens for step in one.steps)
    return {
        "settings": {**one.choice.values, **one.choice.numbers},
        "step_s": one.mean_s,
        "tokens_per_s": tokens / sum(step.step_s for step in one.steps),
        "peak_bytes": max(step.peak_bytes for step in one.steps),
        "bubble_frac": mean(outcome.bubble_frac for outcome in outcomes),
        "exposed_frac": mean(outcome.exposed_frac for outcome in outcomes),
        "tie": _is_tie(one, best),
        "costs": one.choice.chain.context.costs.source,
    }


def _is_tie(one: Played, best: Played) -> bool:
    """Whether batches differ by more than the settings do: within two standard errors of the paired differences."""
    apart = np.array(one.floors_s) - np.array(best.floors_s)
    if len(apart) < 2:
        return bool(apart[0] == 0.0)
    return bool(apart.mean() <= 2.0 * apart.std(ddof=1) / math.sqrt(len(apart)))


def _best_known(some: Iterable[Played]) -> tuple[float, str]:
    """The mean step of the fastest of some settings, or a floor of them all [s], and which of the two."""
    alive = [one for one in some if not one.out]
    whole = [one.mean_s for one in alive if one.whole]
    floors = [one.mean_s for one in alive if not one.whole]
    if whole and min(whole) <= min(floors, default=math.inf):
        return min(whole), "planned"
    return min([*floors, *whole], default=math.inf), "bound"


def _lines(search: SearchState, space: Space, known: list[Played]) -> list[Result]:
    """A line a value of each axis: how fast it may be compared with the best, or why it cannot run."""
    lines = []
    for key, values in space.axes.items():
        for value in values if len(values) > 1 else ():
            here = [one for one in search.played if one.choice.values.get(key) == value]
            seconds, kind = _best_known(here)
            why = ""
            if math.isinf(seconds):
                why = _why(here, [error for at, error in space.refused if at.get(key) == value])
            over = seconds / known[0].mean_s if known and math.isfinite(seconds) else None
            lines.append({"key": key, "value": value, "over_best": over, "is": None if why else kind, "why": why})
    return lines


def _why(here: list[Played], refused: list[EvenloadError]) -> str:
    lacking = [one.lacking_bytes for one in here if one.out == LACKS]
    if lacking:
        return f"lacks {min(lacking) / 2**30:.3g} GiB"
    if here:
        return here[0].out
    return f"{refused[0].what} ({refused[0].found})" if refused else "not tried"


def _layouts(known: list[Played], weights: int) -> list[Result]:
    """The fastest setting of each layout that was planned, and whether a table of rules would have named it."""
    rows: dict[tuple[int, ...], Result] = {}
    for one in known:
        layout = one.choice.chain.context.layout
        degrees = (layout.tp, layout.pp, layout.ep)
        row = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "dp": layout.dp, "step_s": one.mean_s}
        rows.setdefault(
            degrees, {**row, "over_best": one.mean_s / known[0].mean_s, "by_hand": by_hand(layout, weights)}
        )
    return list(rows.values())


def by_hand(layout: Layout, weights: int) -> bool:
    """Whether a table of rules names the layout for a model of so many weights."""
    degrees = next((row for most, row in BY_HAND if weights <= most), BY_HAND[-1][1])
    return (layout.tp, layout.pp) in degrees


def _more_memory(search: SearchState, best: Played | None) -> Result | None:
    """What a device with more memory might gain at the most, by the floors of what does not fit into this one."""
    hopeful = [one for one in search.played if one.out == LACKS and (best is None or one.mean_s < best.mean_s)]
    if not hopeful:
        return None
    one = min(hopeful, key=lambda one: one.lacking_bytes)
    gain = None if best is None else best.mean_s / one.mean_s
    return {"settings": dict(one.choice.values), "lacking_bytes": one.lacking_bytes, "gain_at_most": gain}


def said(values: Mapping[str, Any]) -> str:
    """The values as one would pin them; what is off is left out, and what is on is named alone."""
    words = []
    for key, value in values.items():
        name = key.removeprefix("parallel.").removeprefix("plugins.").removesuffix(".enabled")
        if value is True:
            words.append(name)
        elif value is not False and value != 1:
            words.append(f"cap {value}" if key == CAP else f"{name}={value}")
    return " ".join(words)
