"""Branch and bound over settings: the one whose steps may take least is looked at next.

Every setting has a floor for the mean step over the batches, which no plan of it beats. It rises as more is known: from
the work alone, by the bounds of its plugins, then batch by batch as these are planned and simulated. The setting of the
least floor is always the one to know more of, so when that one is planned whole, none is better: A* over a tree of one
level (Hart, Nilsson and Raphael, 1968), and any moment's answer has a certificate, the least floor of what is left.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import EvenloadError
from ..machine.layout import Layout
from ..plan.step_plan import Lengths
from ..planning.judge import Candidate, judge
from ..simulate.step import after_passes_s
from .space import Choice


@dataclass
class Played:
    """A setting and what is known of it."""

    choice: Choice
    floors_s: list[float]
    """Of the step of each batch; of those that were planned, the step itself."""
    steps: list[Candidate] = field(default_factory=list)
    bounded: bool = False
    """Its plugins were asked for their bounds."""
    out: str = ""
    """Why it cannot run; empty: it can, as far as is known."""
    lacking_bytes: float = 0.0
    """What a device lacks for it, where that is why."""

    @property
    def mean_s(self) -> float:
        """Its mean step, predicted, or a floor of it [s]."""
        return sum(self.floors_s) / len(self.floors_s)

    @property
    def whole(self) -> bool:
        """Whether every batch of it was planned."""
        return len(self.steps) == len(self.floors_s)


@dataclass
class SearchState:
    """What is known of a space at a moment."""

    played: list[Played]
    """All settings."""
    left: list[tuple[float, int, int]] = field(default_factory=list)
    """A heap of (floor, order among equals, place) of those that may still be better than they are known to be."""

    def fill(self) -> None:
        """Set all settings on the heap that may still be better than they are known to be."""
        self.left = [(one.mean_s, _order(one), at) for at, one in enumerate(self.played) if not one.out]
        heapq.heapify(self.left)

    @property
    def best(self) -> Played | None:
        """The fastest of those planned whole."""
        whole = [one for one in self.played if one.whole and not one.out]
        return min(whole, key=lambda one: one.mean_s, default=None)

    @property
    def gap(self) -> float:
        """By how much any other setting could be faster than the best, as a share of the step; 0: none is."""
        if self.best is None:
            return math.inf
        least_s = self.left[0][0] if self.left else math.inf
        return max(0.0, self.best.mean_s / least_s - 1.0)


def best_first(
    choices: Sequence[Choice], batches: Sequence[Lengths], beside: Callable[[Layout], bool] = lambda _: False
) -> Iterator[SearchState]:
    """The search by bounds alone and after each plan, until the best is proven; who has seen enough stops asking.

    ``beside``: layouts of which one setting is planned, whatever its floor.
    """
    search = SearchState([_bounded(choice, batches) for choice in choices])
    search.fill()
    yield search
    for one in _one_of_each_layout(search.played, batches):
        asked = beside(one.choice.chain.context.layout)
        while not (one.out or one.whole) and (asked or search.best is None or one.mean_s < search.best.mean_s):
            if _know_more(one, batches):
                search.fill()
                yield search
    while search.left:
        _, order, place = heapq.heappop(search.left)
        one = search.played[place]
        if one.whole:
            # No other can take less: those left are no better by their floors.
            heapq.heappush(search.left, (one.mean_s, order, place))
            return
        planned = _know_more(one, batches)
        if not one.out:
            heapq.heappush(search.left, (one.mean_s, order, place))
        if planned:
            yield search


def _order(one: Played) -> int:
    """Among equal floors first those whose planners have more to choose from."""
    return -len(one.choice.chain.links)


def _one_of_each_layout(played: Sequence[Played], batches: Sequence[Lengths]) -> Iterator[Played]:
    """One setting for each layout: that of the least floor, and of equal ones that which is planned soonest."""
    first: dict[Layout, Played] = {}
    work_s = {id(one): one.choice.chain.work_s(batches[0]) for one in played}
    for one in sorted(played, key=lambda one: (one.mean_s, work_s[id(one)])):
        if not one.out:
            first.setdefault(one.choice.chain.context.layout, one)
    yield from first.values()


def _bounded(choice: Choice, batches: Sequence[Lengths]) -> Played:
    lacking_bytes = max(choice.lacking_bytes(batch) for batch in batches)
    after_s = after_passes_s(choice.chain.context)
    if lacking_bytes > 0:
        return Played(choice, _of_any_memory(choice, batches), out=LACKS, lacking_bytes=lacking_bytes)
    floors_s = [choice.chain.passes_floor_s(batch) + after_s for batch in batches]
    return Played(choice, floors_s)


def _of_any_memory(choice: Choice, batches: Sequence[Lengths]) -> list[float]:
    """What no plan of a setting beats, however much a device holds [s], for each batch."""
    after_s = after_passes_s(choice.chain.context)
    return [choice.chain.passes_floor_s(batch, fits=False) + after_s for batch in batches]


LACKS = "a device has too little memory"


def _know_more(one: Played, batches: Sequence[Lengths]) -> bool:
    """Raise a setting's floor; true where a batch of it was planned."""
    chain = one.choice.chain
    if not one.bounded:
        one.bounded, after_s = True, after_passes_s(chain.context)
        for place, batch in enumerate(batches):
            one.floors_s[place] = max(one.floors_s[place], chain.plugins_floor_s(batch) + after_s)
        return False
    place = len(one.steps)
    try:
        step = judge(chain.plan(batches[place]), chain.context)
    except EvenloadError as error:
        one.out = f"{error.what} ({error.found})"
        return True
    one.steps.append(step)
    one.floors_s[place] = step.step_s
    if not step.fits:
        one.out, one.lacking_bytes = LACKS, step.missing_bytes
        one.floors_s = _of_any_memory(one.choice, batches)
    return True
