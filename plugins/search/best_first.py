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
from dataclasses import dataclass, field, replace

from ...core.errors import EvenloadError
from ...core.machine.layout import Layout
from ...core.planning.chain import PlanChain
from ...core.planning.floors import in_schedule_s, step_floor_s
from ...core.planning.judge import Candidate, judge
from .space import Choice, SearchBatch


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
    alike: list[Played] = field(default_factory=list, repr=False, compare=False)
    """The settings that differ from it in nothing but whether the gradient sum overlaps, itself among them."""

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
        """Set all settings on the heap that may still be better than they are known to be; among equal floors first
        those whose planners have more to choose from."""
        self.left = [
            (one.mean_s, -len(one.choice.chain.links), at) for at, one in enumerate(self.played) if not one.out
        ]
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


def best_first(choices: Sequence[Choice], batches: Sequence[SearchBatch]) -> Iterator[SearchState]:
    """The search by bounds alone and after each plan, until the best is proven; who has seen enough stops asking."""
    search = SearchState([_bounded(choice, batches) for choice in choices])
    alike: dict[str, list[Played]] = {}
    for one in search.played:
        one.alike = alike.setdefault(_without_overlap(one.choice.chain), [])
        one.alike.append(one)
    search.fill()
    yield search
    for one in _one_of_each_layout(search.played, batches):
        while not (one.out or one.whole) and (search.best is None or one.mean_s < search.best.mean_s):
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


def beside(
    search: SearchState, batches: Sequence[SearchBatch], asked: Callable[[Layout], bool]
) -> Iterator[SearchState]:
    """The search after each further plan, until a setting of each layout that is asked for was planned whole or cannot
    run."""
    known = {one.choice.chain.context.layout for one in search.played if one.whole}
    for one in _one_of_each_layout(search.played, batches):
        layout = one.choice.chain.context.layout
        while asked(layout) and layout not in known and not (one.out or one.whole):
            if _know_more(one, batches):
                search.fill()
                yield search


def _one_of_each_layout(played: Sequence[Played], batches: Sequence[SearchBatch]) -> Iterator[Played]:
    """One setting for each layout, that of the least floor, and of equal ones that which is planned soonest; layouts
    that are planned soonest first, so that there is an answer early, and slower ones need no plan: those without stages
    before those with any, whose plans take the longer the more stages there are, or ranks of the same stage."""
    work_s = {id(one): one.choice.chain.work_s(batches[0].lengths) for one in played}
    rows: dict[Layout, list[Played]] = {}
    for one in played:
        if not one.out:
            rows.setdefault(one.choice.chain.context.layout, []).append(one)

    def rank(one: Played) -> tuple[float, float]:
        return one.mean_s, work_s[id(one)]

    def sooner(row: list[Played]) -> tuple[bool, float, float]:
        least, layout = min(row, key=rank), row[0].choice.chain.context.layout
        staged = layout.pp > 1
        return staged, max(layout.pp, layout.dp_cp_size) if staged else work_s[id(least)], least.mean_s

    for row in sorted(rows.values(), key=sooner):
        while not (least := min(row, key=rank)).bounded:
            _know_more(least, batches)
        yield least


def _without_overlap(chain: PlanChain) -> str:
    """Equal for chains that differ in nothing but whether the gradient sum overlaps."""
    traffic = replace(chain.context.traffic, overlap_gradients=False)
    return repr(replace(chain, context=replace(chain.context, traffic=traffic)))


def _bounded(choice: Choice, batches: Sequence[SearchBatch]) -> Played:
    lacking_bytes = max(choice.lacking_bytes(batch.lengths) for batch in batches)
    fits = lacking_bytes <= 0
    floors_s = [step_floor_s(choice.chain, batch.lengths, fits=fits) for batch in batches]
    return Played(choice, floors_s) if fits else Played(choice, floors_s, out=LACKS, lacking_bytes=lacking_bytes)


LACKS = "a device has too little memory"


def _know_more(one: Played, batches: Sequence[SearchBatch]) -> bool:
    """Raise a setting's floor; true where a batch of it was planned."""
    chain = one.choice.chain
    if not one.bounded:
        one.bounded = True
        for place, batch in enumerate(batches):
            one.floors_s[place] = max(one.floors_s[place], step_floor_s(chain, batch.lengths, asked=True))
        return False
    place = len(one.steps)
    try:
        step = _planned(one, batches[place])
    except EvenloadError as error:
        one.out = f"{error.what} ({error.found})"
        return True
    one.steps.append(step)
    one.floors_s[place] = step.step_s
    if not step.fits:
        one.out, one.lacking_bytes = LACKS, step.missing_bytes
        one.floors_s = [step_floor_s(chain, batch.lengths, fits=False) for batch in batches]
    return True


def _planned(one: Played, batch: SearchBatch) -> Candidate:
    """The plan of the setting's next batch. Raises EvenloadError.

    Where the trainer's own schedule runs nothing as fast, whether it overlaps the gradient sum changes no plan.
    """
    chain, place = one.choice.chain, len(one.steps)
    known = (other.steps[place] for other in one.alike if len(other.steps) > place)
    for step in known:
        if not step.plan.in_host_schedule and step.step_s <= in_schedule_s(chain, batch.lengths):
            return step
    return judge(chain.plan(*batch), chain.context)
