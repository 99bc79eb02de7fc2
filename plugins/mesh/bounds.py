"""Certified lower bounds: what no division of a batch among ranks can beat.

`lower_bound_s` holds for every plan of a step: groups of ranks disjoint or overlapping, zones, slices, remapped tokens.
A plan in which no rank is busy for longer than C can only run a sequence on degrees d that are done in time, and then
takes at least the least rank-seconds among those:

    area_k(C) = min { compute_k + d * open_k(d) :  compute_k / d + exposed_k(d) <= C - launches }
    bound     = the least C with   sum_k area_k(C) + launches  <=  N * C

``exposed`` is the communication that a sequence's own attention does not hide, ``open`` the part of it that nothing
hides: hops of a ring wait no longer where other sequences share its ranks.

Slices of one sequence may run on different degrees in turn, so there the minimum is over mixtures (the lower convex
hull of time and rank-seconds); with remapped tokens only attention must be done on the ranks of the sequence. Where all
ranks meet in every micro-batch (ZeRO 3), those next to the longest sequence have no more than their cap of tokens to
fill the time that it takes. A millisecond, once `cost_table` has its table; that is read from below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.balance.step_bound import passes_bound_s, stage_costs
from ...core.costs.context import PlanningContext
from ...core.plan.limits import Limits
from .config import MeshConfig
from .cost_table import CostTable, cost_table_of

_PRECISION = 1e-4
"""Relative width at which a search for the least time ends."""
_INSTANT = 1e-9
"""Seconds below which times count as equal: without launches the search begins at none."""
_NEVER = 1e9
"""Seconds that no sequence takes."""
_TOGETHER = 3
"""Longest sequences of which each two are asked how they run,"""
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 1.0)
"""and rates, among the seconds a token of all others."""


def lower_bound_s(lengths: Ints, limits: Limits, context: PlanningContext, config: MeshConfig) -> float:
    """No plan of these sequences has run its last pass before [s]; forward and backward, gradient sum left out.

    lengths int [K] in tokens; ``limits.max_tokens`` is the cap of a rank.
    """
    if not len(lengths):
        return 0.0
    least_s = passes_bound_s(lengths, limits, context, shares=True)
    ranks, cuts, cap, total = limits.num_ranks, not limits.whole_sequences, limits.max_tokens, float(lengths.sum())
    stages = stage_costs(context)
    # Where backwards hold a forward, the last stage need not run any other.
    again = context.costs.recompute and cuts
    stage = stages[-2] if again and len(stages) > 1 else stages[-1]
    skips = again and len(stages) == 1
    whole = stage.backward if skips else stage.both
    # The rank of a sequence may have an ep-th of the sequence's parts at experts.
    both = whole.at_experts(1.0 / context.costs.ep)
    context = (
        replace(context, costs=context.costs.at_experts(1.0 / context.costs.ep)) if limits.in_step > 1 else context
    )
    bound_to_ranks = not cuts and config.remap == "off"  # a sequence's tokens are all where its attention is
    cost_table = cost_table_of(context, limits, config, int(lengths.max()))
    rounds = float(np.ceil(total / (ranks * cap)))
    launches_s = both.launch_s * (rounds if limits.together > 1 else max(1.0, total / (ranks * cap)))
    # The rank that shares the longest sequence has one launch; where all run in step it has those of all others too.
    beside_s = launches_s if limits.together > 1 else both.launch_s
    way_s = stage.in_s + (0.0 if limits.splits_backward else stage.out_s)

    alone = both.seconds(lengths.astype(np.float64))
    # On one rank nothing is exposed but what always is, so no other degree takes fewer rank-seconds.
    long = (alone > alone.sum() / ranks) | (bound_to_ranks & (lengths > cap))
    elsewhere, held = both.linear_s if config.remap != "off" else 0.0, cap if bound_to_ranks else np.inf
    areas = _Areas(alone[long], lengths[long], cost_table, elsewhere, held, skips=skips)
    rest = float(alone[~long].sum())

    def possible(seconds: float) -> bool:
        area = areas.least(seconds - beside_s, mixed=cuts)
        return rest + area + ranks * launches_s <= ranks * seconds

    bound_s = search(possible, rest / ranks + launches_s)
    if limits.together > 1 and bound_to_ranks and long.any():
        bound_s = max(bound_s, launches_s + areas.with_company(ranks, cap, alone[~long], lengths[~long]))
    return max(least_s, way_s + bound_s)


class _Long(NamedTuple):
    time: Floats
    area: Floats
    degree: Ints
    """The most of the range that a column stands for, and the least."""
    least: Ints
    used: Floats
    """The longest that its ranks can be busy without a further long sequence, at each rate."""


class _Areas:
    """Times and rank-seconds of long sequences by degree, from below, degrees between priced ones included."""

    def __init__(
        self, alone: Floats, lengths: Ints, cost_table: CostTable, elsewhere: float, cap: float, *, skips: bool
    ) -> None:
        """``elsewhere``: seconds of a token's work that other ranks may do; ``skips``: no forward need run."""
        degrees = cost_table.degrees
        priced = [_from_below(lengths, cost_table, j, skips=skips) for j in range(len(degrees))]
        exposed, never_hidden = (np.stack(rows, axis=1) for rows in zip(*priced, strict=True))
        gaps = np.flatnonzero((np.diff(degrees) > 1) & (not cost_table.config.powers_of_two))
        least, most = np.concatenate([degrees, degrees[gaps] + 1]), np.concatenate([degrees, degrees[gaps + 1] - 1])
        # No degree between two priced ones exposes less than the better of both.
        exposed, never_hidden = (
            np.concatenate([rows, np.minimum(rows[:, gaps], rows[:, gaps + 1])], axis=1)
            for rows in (exposed, never_hidden)
        )
        fits = lengths[:, None] <= most * cap
        self._lengths = lengths
        self._least = least
        self._most = most
        self._time = np.where(fits, (alone - elsewhere * lengths)[:, None] / most + exposed, np.inf)
        self._area = np.where(fits, alone[:, None] + least * never_hidden, np.inf)

    def with_company(self, ranks: int, cap: float, alone: Floats, lengths: Ints) -> float:
        """Least seconds of all rounds together, where ranks that have too few tokens wait for long sequences.

        A rank's tokens in a round are at most ``cap``; they take at most ``rate`` each, but for sequences that cost
        more, and what those cost more can fill a wait only once. Asked of the longest sequence by itself, and of each
        two of the longest: in different rounds, in one round on ranks of their own, or on some in common.
        ``alone`` [S]: seconds of all other, short sequences on one rank each; ``lengths`` int [S]: their tokens.
        """
        order = np.argsort(-self._lengths, kind="stable")[:_TOGETHER].tolist()
        pairs = [(order[0], order[0]), *combinations(order, 2)]
        return max(self._of_two(pair, ranks, cap, alone, lengths) for pair in pairs)

    def _of_two(self, pair: tuple[int, int], ranks: int, cap: float, alone: Floats, lengths: Ints) -> float:
        both_numbers = list(dict.fromkeys(pair))
        area = np.concatenate([np.delete(self._area.min(axis=1), both_numbers), alone])
        tokens = np.concatenate([np.delete(self._lengths, both_numbers), lengths])
        rate = np.quantile(area / tokens, _QUANTILES) if len(area) else np.zeros(1)
        work = np.minimum(area[:, None], tokens[:, None] * rate).sum(axis=0)
        one, two = (self._column_of(k, rate, cap, axis) for axis, k in enumerate(pair))

        def step(rounds_s: Floats, waits: Floats, both: Floats) -> float:
            total = both + np.maximum(area.sum(), (work + waits).max(axis=-1))
            return float(np.maximum(rounds_s, total / ranks).min())

        def wait(of: _Long) -> Floats:
            return np.maximum(0, ranks - of.degree) * np.maximum(0.0, of.time - rate * cap)

        if len(both_numbers) == 1:
            return step(one.time[..., 0], wait(one), one.area[..., 0])
        both = (one.area + two.area)[..., 0]
        apart = step((one.time + two.time)[..., 0], wait(one) + wait(two), both)
        free = np.maximum(0, ranks - one.degree - two.degree)
        beside_s = np.maximum(one.time, two.time)
        waits = free * np.maximum(0.0, beside_s - rate * cap)
        waits = waits + one.degree * np.maximum(0.0, beside_s - one.used)
        waits = waits + two.degree * np.maximum(0.0, beside_s - two.used)
        possible = (one.least + two.least <= ranks)[..., 0]
        beside = step(np.where(possible, beside_s[..., 0], np.inf), waits, both)
        after_s = one.time + two.time
        ends = []
        for common in (np.maximum(1, one.degree + two.degree - ranks), np.minimum(one.degree, two.degree)):
            waits = np.maximum(0, ranks - one.degree - two.degree + common) * np.maximum(0.0, after_s - rate * cap)
            waits = waits + (one.degree - common) * np.maximum(0.0, after_s - one.used)
            ends.append(waits + (two.degree - common) * np.maximum(0.0, after_s - two.used))
        return min(apart, beside, step(after_s[..., 0], np.minimum(*ends), both))

    def _column_of(self, k: int, rate: Floats, cap: float, axis: int) -> _Long:
        """A long sequence on every degree that holds it, along an axis of [degrees of one, degrees of two, rates]."""
        fits = np.isfinite(self._time[k])
        shape = (-1, 1, 1) if axis == 0 else (1, -1, 1)
        time, area, degree, least = (
            row[fits].reshape(shape) for row in (self._time[k], self._area[k], self._most, self._least)
        )
        left = np.maximum(0.0, cap - self._lengths[k] / degree)
        return _Long(time, area, degree, least, np.maximum(time + rate * left, rate * cap))

    def least(self, seconds: float, *, mixed: bool) -> float:
        """Least rank-seconds of all in which each is done in time; infinite where one cannot be.

        ``mixed``: a sequence may run on several degrees in turn.
        """
        time, area = self._time, self._area
        areas = np.where(time <= seconds, area, np.inf).min(axis=1, initial=np.inf)
        if mixed and len(areas) and np.isfinite(areas).all():
            time, area = np.where(np.isfinite(time), time, _NEVER), np.where(np.isfinite(area), area, _NEVER)
            slow, fast = time[:, :, None], time[:, None, :]
            pairs = (slow > seconds) & (fast <= seconds)
            share = (seconds - fast) / np.where(pairs, slow - fast, 1.0)
            both = share * area[:, :, None] + (1 - share) * area[:, None, :]
            areas = np.minimum(areas, np.where(pairs, both, np.inf).min(axis=(1, 2)))
        return float(areas.sum())


def _from_below(lengths: Ints, cost_table: CostTable, column: int, *, skips: bool) -> tuple[Floats, Floats]:
    """What sharing attention exposes, the best way on a priced degree [K]: alone, and what nothing ever hides. Forward
    and backward, or the latter alone.

    Hops of a ring may hide behind sequences that share its ranks. Between two lengths of the table the least of the
    chord and of its neighbours' extensions: that is below a function that bends up, one that bends down, and one with
    an edge where communication begins to hide behind attention.
    """
    grid, (numbers, first, second) = cost_table.grid, cost_table.columns[column]
    if not numbers:
        return np.full(len(lengths), np.inf), np.full(len(lengths), np.inf)
    modules = cost_table.modules[int(cost_table.degrees[column])]
    rows = second - modules[1] if skips else first + second - modules.sum(axis=0)  # [ways, grid]
    slope = np.diff(rows, axis=1) / np.diff(grid)
    at = np.clip(np.searchsorted(grid, lengths, side="right") - 1, 0, len(grid) - 2)
    left, right = np.maximum(at - 1, 0), np.minimum(at + 1, slope.shape[1] - 1)
    start, end = lengths - grid[at], lengths - grid[at + 1]
    chord = rows[:, at] + slope[:, at] * start
    before = rows[:, at] + slope[:, left] * start
    after = rows[:, at + 1] + slope[:, right] * end
    seconds = np.maximum(0.0, np.minimum(np.minimum(chord, before), after))
    seconds = np.where(lengths < grid[0], 0.0, seconds)
    hides = np.array([cost_table.strategies[number].cp_comm in ("ring", "hybrid") for number in numbers])
    return seconds.min(axis=0), np.where(hides[:, None], 0.0, seconds).min(axis=0)


def search(possible: Callable[[float], bool], least: float) -> float:
    """The largest time known to be impossible, or ``least``; possible is taken to be so from some time on."""
    if possible(least):
        return least
    low, high = least, max(2 * least, _INSTANT)
    while not possible(high):
        low, high = high, 2 * high
    while high - low > _PRECISION * max(low, _INSTANT):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if possible(middle) else (middle, high)
    return low
