"""Even padded groups: whole sequences as rows of one length, for models that keep apart only what is in other rows.

A micro-batch of k rows whose longest has n tokens costs launch + k c(n), c a sequence's seconds, and may hold k n
tokens up to a cap. Let rows be sorted, longest first. Any micro-batches can be exchanged for runs of neighbours of the
same sizes, none of them longer and so none dearer, so runs are enough, and the least total is that of a shortest path:

    T(i) = min over k of  launch + k c(n_i) + T(i + k)                                    T(K) = 0

T(0) over the number of ranks bounds every plan. Ranks that wait for each other in every pass run rounds, whose
costliest micro-batch all wait for. A round from row i on within b seconds is filled greedily, a run for each rank, up
to e(i, b):

    V(i) = min over b of  launch + b + V(e(i, b))                                         V(K) = 0

with b on a grid from c(n_i) on. That gives rounds of neighbours; others are runs of equal cost in as few rounds as
hold them, and those of least total. In small batches the best of them is polished: borders between runs move, runs join
and part. Rounds are dealt over groups of ranks that need not wait for each other, longest first. What a sequence costs
besides its tokens (`Costs.beside`) is the same in any micro-batch, so it is no part of T; runs are weighed with it.

Shape legend: K = rows, B = budgets tried.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.balance.partition import longest_first, members
from ...core.costs.context import PlanningContext
from ...core.costs.costs import PassCost
from ...core.costs.exposed import gathering_s
from ...core.plan.limits import Limits
from ...core.plan.step_plan import StepPlan
from .candidates import uncut

_GRID = np.unique(np.concatenate([np.arange(1.0, 8.0, 0.25), 8.0 * 1.04 ** np.arange(120)]))
"""Budgets of a round, over the seconds of its longest row."""
_MOST_WORK = 1 << 26
"""SortedRows x budgets x ranks up to which rounds of neighbours are searched for on the whole grid."""
_MORE_ROUNDS = 4
"""Rounds tried beyond the fewest."""
_HALVINGS = 40
_STARTS, _POLISHED = 3, 1 << 17
"""Plans that are polished, and how many runs may be looked at for each."""

Stops = list[int]
"""Where each run begins among the rows, and the number of rows at the end."""


class SortedRows(NamedTuple):
    """The sequences of a batch as rows, the longest first, of equal ones that which costs most."""

    order: Ints
    """Which sequence each row is, int64 [K]."""
    tokens: Ints
    """int64 [K]."""
    seconds: Floats
    """Of a row of so many tokens, float64 [K]."""
    launch_s: float
    most: Ints
    """SortedRows of a micro-batch that begins with each row, under the token cap, int64 [K]."""
    beside: list[float]
    """Seconds besides tokens (`Costs.beside`) of all rows before each, [K + 1]."""

    @classmethod
    def of(cls, lengths: Ints, limits: Limits, context: PlanningContext, price: PassCost | None = None) -> SortedRows:
        """``price``: of a micro-batch; None: forward and backward."""
        price = price or context.costs.both
        beside_s = context.costs.beside_s(len(lengths))
        order = np.lexsort((-beside_s, -lengths))
        tokens = lengths[order]
        most = np.minimum(np.maximum(1, limits.max_tokens // tokens), len(tokens) - np.arange(len(tokens)))
        launch_s = price.launch_s + sum(gathering_s(context, passes) for passes in (1, 2))
        seconds = np.asarray(price.seconds(tokens.astype(np.float64)))
        return cls(order, tokens, seconds, launch_s, most, [0.0, *np.cumsum(beside_s[order]).tolist()])

    def costs(self, stops: Stops) -> list[float]:
        """Seconds of each run of these, in their order."""
        return [self.cost(a, b) for a, b in pairwise(stops)]

    def cost(self, start: int, stop: int) -> float:
        return float(self.seconds[start]) * (stop - start) + self.beside[stop] - self.beside[start] + self.launch_s


def portfolio(incoming: StepPlan, limits: Limits, context: PlanningContext) -> Iterator[StepPlan]:
    """Plans of padded groups, the fastest first."""
    rows, ranks = SortedRows.of(incoming.lengths, limits, context), limits.num_ranks
    fewest = -(-(len(greedy(rows, np.inf)) - 1) // ranks)
    tried = [rounds_of_neighbours(rows, limits.together), least_total(rows)[1]]
    tried += [equal_runs(rows, (fewest + more) * ranks) for more in range(_MORE_ROUNDS + 1)] if len(rows.tokens) else []
    tried.sort(key=lambda stops: passes_s(rows.costs(stops), limits))
    if limits.together == ranks > 1:
        starts = [polished(rows, stops, limits) for stops in tried[:_STARTS]]
        tried[:0] = [min(starts, key=lambda stops: passes_s(rows.costs(stops), limits))]
    for stops in tried:
        yield of_runs(incoming, limits, rows, stops)


def bound_s(lengths: Ints, limits: Limits, context: PlanningContext) -> float:
    """No plan of padded groups has a busiest rank below this [s], certified. lengths int64 [K]."""
    if not len(lengths):
        return 0.0
    costs = context.costs
    # A host that replays need not run a forward for its output alone.
    price = costs.backward if costs.recompute and not limits.whole_sequences else costs.both
    rows = SortedRows.of(lengths, limits, context, price)
    alone_s = float(price.at_experts(1.0 / costs.ep).seconds(float(rows.tokens[0]))) + rows.launch_s
    return max(least_total(rows)[0] / limits.num_ranks, alone_s)


def passes_s(costs: list[float], limits: Limits) -> float:
    """About how long micro-batches of these seconds take: the costliest of neighbouring ranks run at once, and a
    pipeline fills and drains by the costliest of all."""
    rounds = sorted(costs, reverse=True)[:: limits.together]
    groups = limits.num_ranks // limits.together
    ends = [0.0] * groups
    if groups == 1:
        ends = [sum(rounds)]
    else:
        for seconds in rounds:
            heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends) + (limits.num_stages - 1) * max(rounds, default=0.0)


def least_total(rows: SortedRows) -> tuple[float, Stops]:
    """The least seconds of all micro-batches together, and these: T(0) above."""
    count = len(rows.tokens)
    total, best = np.zeros(count + 1), np.ones(count, dtype=np.int64)
    sizes = np.arange(1, int(rows.most.max(initial=1)) + 1)
    for i in range(count - 1, -1, -1):
        most = int(rows.most[i])
        tried = rows.seconds[i] * sizes[:most] + total[i + 1 : i + 1 + most]
        best[i] = tried.argmin() + 1
        total[i] = rows.launch_s + tried[best[i] - 1]
    return float(total[0]), walked(lambda i: i + int(best[i]), count)


def equal_runs(rows: SortedRows, count: int) -> Stops:
    """At most so many micro-batches, of which the costliest costs least; more where the token cap asks for them."""
    low, high = float(rows.seconds[0]), float(rows.seconds.sum() + rows.seconds[0] * len(rows.seconds))
    high += rows.beside[-1]
    best = greedy(rows, high)
    if len(best) - 1 > count:
        return best
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        stops = greedy(rows, middle)
        if len(stops) - 1 <= count:
            best, high = stops, middle
        else:
            low = middle
    return best


def rounds_of_neighbours(rows: SortedRows, size: int) -> Stops:
    """Micro-batches of rounds of ``size`` ranks, one of which begins where the one before it ends: V(0) above."""
    count = len(rows.tokens)
    grid = _GRID[:: max(1, -(-len(_GRID) * size * count // _MOST_WORK))]
    seconds, most = np.append(rows.seconds, 1.0), np.append(rows.most, 0)
    # Of each budget and row, [B, K].
    budgets = grid[:, None] * rows.seconds
    at, longest = np.broadcast_to(np.arange(count), budgets.shape).copy(), np.zeros(budgets.shape)
    for _ in range(min(size, count)):
        filled = np.minimum((budgets / seconds[at] + 1e-9).astype(np.int64), most[at])
        longest = np.maximum(longest, filled * seconds[at])
        at += filled
    total, chosen = np.zeros(count + 1), np.zeros(count, dtype=np.int64)
    for i in range(count - 1, -1, -1):
        tried = longest[:, i] + total[at[:, i]]
        chosen[i] = tried.argmin()
        total[i] = rows.launch_s + tried[chosen[i]]
    stops = [0]
    for first, end in pairwise(walked(lambda i: int(at[chosen[i], i]), count)):
        stops += greedy(rows, float(budgets[chosen[first], first]), first, end)[1:]
    return stops


def polished(rows: SortedRows, stops: Stops, limits: Limits) -> Stops:
    """These runs after moves of a border, joins and partings, each of which makes the step shorter."""
    best_s, left, at = passes_s(rows.costs(stops), limits), _POLISHED, 0
    unchanged = 0
    while left > 0 and unchanged < len(stops):
        unchanged, at = unchanged + 1, (at + 1) % len(stops)
        for other in _neighbours(rows, stops, at):
            left -= len(other)
            if (seconds := passes_s(rows.costs(other), limits)) < best_s * (1 - 1e-9):
                stops, best_s, unchanged = other, seconds, 0
                break
    return stops


def _neighbours(rows: SortedRows, stops: Stops, at: int) -> Iterator[Stops]:
    """Runs that differ around one border, each under the token cap."""
    before, behind, here = stops[:at], stops[at + 1 :], stops[at]
    middles: list[list[int]] = []
    if before and behind:
        middles = [[here + step] for step in (-4, -2, -1, 1, 2, 4)] + [[]]
    if behind:
        middles += [[here, here + (behind[0] - here) * part // 4] for part in (1, 2, 3)]
    for middle in middles:
        inner = [before[-1] if before else -1, *middle, behind[0] if behind else len(rows.tokens)]
        ascends = all(a < b for a, b in pairwise(inner))
        if ascends and all(b - a <= rows.most[a] for a, b in pairwise(inner) if a >= 0):
            yield [*before, *middle, *behind]


def of_runs(incoming: StepPlan, limits: Limits, rows: SortedRows, stops: Stops) -> StepPlan:
    """The plan of these micro-batches: the costliest of neighbouring ranks run at once, rounds are dealt longest first
    over groups of ranks that need not wait for each other."""
    size, groups, cost = limits.together, limits.num_ranks // limits.together, rows.costs(stops)
    by_cost = sorted(range(len(cost)), key=lambda k: (-cost[k], k))
    rounds = [by_cost[first : first + size] for first in range(0, len(cost), size)]
    of_groups = longest_first(np.array([cost[one[0]] for one in rounds]), groups)
    packs: list[list[list[int]]] = [[] for _ in range(limits.num_ranks)]
    for group, own in enumerate(members(of_groups, groups)):
        for turn, number in enumerate(own):
            round_ = [rows.order[stops[k] : stops[k + 1]].tolist() for k in rounds[number]]
            round_ += [[]] * (size - len(round_))
            # To and fro, so that no rank has the costliest of every round.
            for place, pack in enumerate(round_[:: -1 if turn % 2 else 1]):
                packs[group * size + place].append(pack)
    return with_rows(uncut(incoming, limits, packs, "packing"))


def with_rows(plan: StepPlan) -> StepPlan:
    """The plan with every micro-batch's sequences as rows of one length."""
    rows = ((m, max((s.length for s in m.slices), default=0)) for m in plan.micro_batches)
    padded = tuple(m._replace(pad_to=longest if len(m.slices) > 1 else 0) for m, longest in rows)
    return plan.revised(micro_batches=padded)


def widened(plan: StepPlan) -> StepPlan:
    """The plan with rows, under a cap that holds its micro-batches."""
    plan = with_rows(plan)
    widest = max((m.num_padded_tokens for m in plan.micro_batches), default=0)
    return plan.revised(limits=replace(plan.limits, max_tokens=max(plan.limits.max_tokens, widest)))


def group_by_length(incoming: StepPlan, context: PlanningContext, limits: Limits) -> StepPlan:
    """Sorted, equally many rows in each micro-batch, dealt out in turn; so many as are predicted to take least."""
    rows = SortedRows.of(incoming.lengths, limits, context)
    sizes, count = range(1, int(rows.most.max(initial=0) and rows.most[0]) + 1), len(rows.tokens)
    return _in_turn(incoming, limits, rows, [[*range(0, count, size), count] for size in sizes], "group_by_length")


def token_budget(incoming: StepPlan, context: PlanningContext, limits: Limits) -> StepPlan:
    """Sorted, micro-batches of equal padded tokens, dealt out in turn; so many as are predicted to take least."""
    rows, ranks = SortedRows.of(incoming.lengths, limits, context), limits.num_ranks
    by_tokens = rows._replace(seconds=rows.tokens.astype(np.float64))
    fewest = -(-(len(greedy(rows, np.inf)) - 1) // ranks)
    counts = [(fewest + more) * ranks for more in range(_MORE_ROUNDS + 1)] if len(rows.tokens) else []
    return _in_turn(incoming, limits, rows, [equal_runs(by_tokens, count) for count in counts], "token_budget")


def _in_turn(incoming: StepPlan, limits: Limits, rows: SortedRows, tried: list[Stops], made_by: str) -> StepPlan:
    ranks = limits.num_ranks

    def step_s(stops: Stops) -> float:
        cost = rows.costs(stops)
        rounds = np.array(cost + [0.0] * (-len(cost) % ranks)).reshape(-1, ranks)
        return float(rounds.max(axis=1).sum() if limits.together > 1 else rounds.sum(axis=0).max())

    best: Stops = min(tried, key=step_s) if tried else []
    runs = [rows.order[a:b].tolist() for a, b in pairwise(best)]
    return with_rows(uncut(incoming, limits, [runs[rank::ranks] for rank in range(ranks)], made_by))


def greedy(rows: SortedRows, budget_s: float, first: int = 0, stop: int | None = None) -> Stops:
    """Runs from a row on, each of as many rows as cost no more than the budget without the launch, and fit under the
    cap; one at least."""
    end = len(rows.tokens) if stop is None else stop
    stops = [first]
    while first < end:
        most = int(min(budget_s / rows.seconds[first] + 1e-9, rows.most[first], end - first))
        while most > 1 and rows.cost(first, first + most) - rows.launch_s > budget_s * (1 + 1e-9):
            most -= 1
        first += max(1, most)
        stops.append(first)
    return stops


def walked(step: Callable[[int], int], count: int) -> Stops:
    """The stops of a walk from 0 to ``count``."""
    stops = [0]
    while stops[-1] < count:
        stops.append(step(stops[-1]))
    return stops
