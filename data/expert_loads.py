"""Loads of experts that a training run recorded (``log.loads``), as arrays, and regrouped for another ``parallel.ep``.

    {"format": 1, "experts": 8, "topk": 2, "layers": [0, 1], "ranks": 2, "ep": 2}
    {"step": 0, "counts": [round][layer][rank][expert]}

What a rank sends to the experts does not depend on which ranks have them. So the recorded ranks, in their order, form
groups of any size; where a round has too few for a group, the next one of the step joins it, and where a step
has too few, the next step does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..core.errors import EvenloadError, refuse_first, shorten, shown
from ..core.input.bounds import LAYERS, TOKENS, RankCount, Size
from ..core.input.validation import Frozen, described
from .jsonl import read_values

_MOST_COUNTS = 1 << 28
"""Of a file: 2 GiB in memory."""


class _Header(Frozen):
    format: Literal[1]
    experts: Size
    topk: Size
    layers: tuple[Annotated[int, Field(ge=0, lt=LAYERS)], ...]
    ranks: RankCount
    ep: RankCount


@dataclass(frozen=True)
class RecordedLoads:
    """Tokens of ranks for experts, by step."""

    name: str
    """Of the file."""
    num_experts: int
    topk: int
    layers: tuple[int, ...]
    """Of the whole model, from 0."""
    num_ranks: int
    ep: int
    """Ranks that shared the experts of a layer when it was recorded."""
    steps: dict[int, NDArray[np.int64]]
    """Counts [rounds, layers, ranks, experts] by the number of the step, ascending."""

    def in_groups(self, ep: int) -> dict[int, NDArray[np.int64]]:
        """Counts [groups, layers, ep, experts] by step; ranks that fill no group are left out.

        Raises EvenloadError where ``ep`` neither divides the recorded one nor is a multiple of it, or where the file
        does not fill a group.
        """
        if self.ep % ep and ep % self.ep:
            what = "recorded loads cannot be regrouped for this parallel.ep"
            do = "choose a parallel.ep that divides the recorded one, or a multiple of it"
            raise EvenloadError(what, f"parallel.ep {ep}, {self.name} has ep {self.ep}", do)
        groups, rows = {}, []
        for step, counts in self.steps.items():
            rows += list(counts.swapaxes(1, 2).reshape(-1, len(self.layers), self.num_experts))
            if whole := len(rows) // ep * ep:
                stacked = np.stack(rows[:whole]).reshape(-1, ep, len(self.layers), self.num_experts)
                groups[step], rows = stacked.swapaxes(1, 2), []
        if not groups:
            detail = f"parallel.ep {ep}, {self.name} has {len(rows)} micro-batches in {len(self.steps)} steps"
            do = "choose a smaller parallel.ep, or record more steps"
            raise EvenloadError("too few loads are recorded for a group of ranks", detail, do)
        return groups


def read_loads(path: Path) -> RecordedLoads:
    """The loads of a file that ``log.loads`` named. Steps that a resumed run trained again count as it trained them.

    Raises EvenloadError, naming the line, for a file that is missing, empty, damaged or cut short.
    """
    name = shorten(str(path))
    lines = read_values(path)
    place, _, first = next(lines, ("", 0, None))
    if not place:
        raise EvenloadError(f"{name} holds no loads", "an empty file", _RECORD)
    header = described(first, _Header, f"{place} is not a header of recorded loads", _RECORD)
    _refuse_header(header, place)
    steps: dict[int, NDArray[np.int64]] = {}
    size = 0
    for place, _, value in lines:
        step, counts = _step_of(value, (len(header.layers), header.ranks, header.experts), place)
        # A run that goes on from a checkpoint trains the steps after it again.
        size += counts.size - sum(steps.pop(number).size for number in list(steps) if number >= step)
        steps[step] = counts
        if size > _MOST_COUNTS:
            do = "give its first line and fewer of the others"
            raise EvenloadError(f"{name} is too large", f"more than {_MOST_COUNTS} counts", do)
    if not size:
        raise EvenloadError(f"{name} holds no loads", f"{len(steps)} steps, none with a round", _RECORD)
    return RecordedLoads(name, header.experts, header.topk, header.layers, header.ranks, header.ep, steps)


_RECORD = "record one with `evenload train RECIPE log.loads=FILE`"


def _refuse_header(header: _Header, place: str) -> None:
    layers = header.layers
    ascending = bool(layers) and all(a < b for a, b in pairwise(layers))
    do = f"restore the line, or {_RECORD}"
    refuse_first(
        (not ascending, f"{place} names no layers in ascending order", shown(layers), do),
        (header.topk > header.experts, f"{place} has more experts for a token than there are", str(header), do),
        (header.experts % header.ep > 0, f"{place} has an ep that does not divide the experts", str(header), do),
        (header.ranks % header.ep > 0, f"{place} has an ep that does not divide the ranks", str(header), do),
    )


def _step_of(value: Any, shape: tuple[int, int, int], place: str) -> tuple[int, NDArray[np.int64]]:
    """The number of a step and its counts, of which ``shape`` follows the rounds. Raises EvenloadError."""
    do = "mend or delete the line, or record the run again"
    step = value.get("step") if isinstance(value, dict) else None
    if type(step) is not int or not 0 <= step <= TOKENS:
        raise EvenloadError(f"{place} is not a step of recorded loads", shown(value), do)
    try:
        counts = np.array(value.get("counts"))
    except ValueError:  # lists of unequal lengths
        counts = np.array(None)
    if counts.shape == (0,):
        counts = np.zeros((0, *shape), dtype=np.int64)
    if counts.dtype.kind != "i" or counts.ndim != 4 or counts.shape[1:] != shape:
        wanted = "(rounds, {}, {}, {})".format(*shape)
        lies = f"{counts.dtype.name} {counts.shape}" if counts.ndim else "no lists, or some of unequal lengths"
        detail = f"{lies}, its header says integers {wanted}"
        raise EvenloadError(f"{place} has no counts [round][layer][rank][expert]", detail, do)
    if counts.size and not 0 <= counts.min() <= counts.max() <= TOKENS:
        wrong = counts.min() if counts.min() < 0 else counts.max()
        raise EvenloadError(f"{place} has a count that is not a number of tokens", str(wrong), do)
    return step, counts
