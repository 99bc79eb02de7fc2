"""Sequences to replicas of unlike kinds, each by its own seconds (scheduling on unrelated machines).

    minimise  max_r  fixed_k(r) + sum of seconds[s, k(r)] over the sequences s of replica r

LobRA (arXiv 2509.01193, section 4.3) deals buckets of padded lengths by a MILP in every step. Here sequences that only
one kind is cheap for, by the prices below, go longest first to the replica that ends first with them (Graham, 1969),
then those with a choice; for several meanings of cheap, each dealing polished by moves and swaps out of the replica
that ends last. Few sequences are searched whole.

The dual of the linear program over fractions of sequences is a bound without any solver: at prices p_k > 0 of a second
on a replica of kind k that sum up to 1 over all replicas, no dealing ends before

    sum_s min_k p_k seconds[s, k]  +  sum_r p_k(r) fixed_k(r)

The best prices are found by the ellipsoid method with deep cuts (Bland, Goldfarb and Todd, Oper. Res. 1981) in one
dimension less than there are kinds. 8,192 sequences to 512 replicas of three kinds take 0.2 s
(benchmarks/planning/dealing.py). Results depend on the inputs alone; of their order, which of equal sequences goes
where. Not done: optimality, which only the bound speaks of.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from operator import mul

import numpy as np

from ..aliases import Floats, Ints
from ..errors import EvenloadError

_SLACKS = (0.0, 0.01, 0.1, 1.0, np.inf)
"""By how much dearer than its cheapest kind one still is cheap for a sequence: a dealing for each."""
_GAP = 1e-5
"""Of a bound to the best prices' one,"""
_FINE, _APART = 1e-8, 3e-3
"""and where equal sequences are told apart by so much, so that at the best prices hardly any has a choice."""
_STEPS = 80
"""Most steps of the ellipsoid method, times the square of the kinds."""
_REACH = 16
"""Replicas of each kind, those that end first, against which the one that ends last is polished,"""
_PAIRS = 1 << 16
"""with about so many pairs of sequences,"""
_MOVES = 4
"""and so many moves and swaps for each replica, and for 64 more."""
_FEW, _NODES = 12, 1 << 15
"""Sequences that are searched whole, in so many steps at most."""

_Dealing = tuple[Floats, Ints]
"""When each replica ends, float64 [R], and the replica of each sequence, int64 [S]."""


@dataclass(frozen=True)
class Dealt:
    """Which replica has which sequences."""

    replica_of: Ints
    """[S]"""
    seconds: Floats
    """When each replica ends [R]."""
    bound_s: float
    """No dealing of these sequences to these replicas ends before."""

    @property
    def step_s(self) -> float:
        """When the last of them ends."""
        return float(self.seconds.max())


def deal(seconds: Floats, fixed_s: Floats, kind_of: Ints) -> Dealt:
    """Sequences to replicas so that the last one ends early.

    Args:
        seconds: of each sequence on a replica of each kind, float64 [S, K]; infinite where it does not fit.
        fixed_s: of a replica of each kind, whatever it has, float64 [K].
        kind_of: the kind of each replica, int64 [R]; every kind has one.

    Raises:
        EvenloadError: a sequence fits on no replica.
    """
    if len(nowhere := np.flatnonzero(~np.isfinite(seconds).any(axis=1))):
        raise EvenloadError("a sequence fits on no replica", f"number {nowhere[0]}", "give one replica more ranks")
    counts, order = np.bincount(kind_of), np.lexsort((*seconds.T, -seconds.min(axis=1)))
    rows = seconds[order]
    apart = rows * (1 + _APART * (np.arange(len(rows))[:, None] * np.sqrt(np.arange(len(counts)) + 2.5) % 1))
    prices = prices_of(apart, fixed_s, counts, _FINE)
    tries = (_longest_first(rows, fixed_s, kind_of, apart * prices, slack) for slack in _SLACKS)
    ends, chosen = min((_polished(rows, kind_of, *one) for one in tries), key=lambda one: float(one[0].max()))
    bound_s = bound_of(seconds, fixed_s, counts)
    if len(rows) <= _FEW and ends.max() > bound_s * (1 + _GAP):
        ends, chosen = _searched(rows, fixed_s, kind_of, prices, (ends, chosen))
    return Dealt(chosen[np.argsort(order)], ends, bound_s)


def bound_of(seconds: Floats, fixed_s: Floats, counts: Ints) -> float:
    """No dealing to so many replicas of each kind ends before [s], at most 1e-5 under the linear program's optimum.

    ``seconds``, ``fixed_s``: see `deal`; ``counts`` int64 [K].
    """
    prices = prices_of(seconds, fixed_s, counts)
    alone_s = float((seconds + fixed_s).min(axis=1).max(initial=fixed_s.max()))
    return max(alone_s, float((seconds * prices).min(axis=1).sum() + prices * counts @ fixed_s))


def prices_of(seconds: Floats, fixed_s: Floats, counts: Ints, gap: float = _GAP) -> Floats:
    """Prices of a second on a replica of each kind, float64 [K], whose bound is at most so far under the best one."""
    rows, times = np.unique(seconds, axis=0, return_counts=True)
    dims, every = len(counts) - 1, np.arange(len(rows))
    center, shape = np.full(dims, 1 / len(counts)), np.eye(dims)
    best_s, best = -np.inf, np.full(len(counts), 1 / len(counts))
    for _ in range(_STEPS * len(counts) ** 2):
        shares = np.append(center, 1 - center.sum())
        least = int(shares.argmin())
        if inside := shares[least] > 0:
            cheapest = (rows * (shares / counts)).argmin(axis=1)
            ends = fixed_s + np.bincount(cheapest, rows[every, cheapest] * times, len(counts)) / counts
            value_s = float(shares @ ends)
            if value_s > best_s:
                best_s, best = value_s, shares
            outward, over = ends[-1] - ends[:-1], best_s - value_s
        else:
            outward, over = -np.eye(dims)[least] if least < dims else np.ones(dims), -shares[least]
        reach = float(np.sqrt(max(0.0, outward @ shape @ outward)))
        if over >= reach or (inside and reach - over <= gap * best_s):
            break
        depth, step = over / reach, shape @ outward / reach
        center = center - (1 + dims * depth) / (dims + 1) * step
        across = (1 - depth**2) * dims**2 / (dims**2 - 1) if dims > 1 else 0.0
        onward, line = ((1 - depth) * dims / (dims + 1)) ** 2, np.outer(step, step)
        shape = across * (shape - line) + onward * line
    return np.asarray(best / counts, dtype=np.float64)


def _longest_first(rows: Floats, fixed_s: Floats, kind_of: Ints, costs: Floats, slack: float) -> _Dealing:
    """Each sequence, in order, to the replica that ends first with it among those of kinds that are cheap for it;
    sequences with a choice last, as they even out the kinds."""
    cheap = np.isfinite(rows) & (costs <= costs.min(axis=1, keepdims=True) * (1 + slack))
    heaps: list[list[tuple[float, int]]] = [[] for _ in fixed_s]
    for replica, kind in enumerate(kind_of.tolist()):
        heaps[kind].append((float(fixed_s[kind]), replica))
    chosen, ends = np.zeros(len(rows), dtype=np.int64), fixed_s[kind_of]
    seconds, kinds = rows.tolist(), [np.flatnonzero(row).tolist() for row in cheap]
    for sequence in np.argsort(cheap.sum(axis=1) > 1, kind="stable").tolist():
        end, kind = min((heaps[kind][0][0] + seconds[sequence][kind], kind) for kind in kinds[sequence])
        replica = chosen[sequence] = heaps[kind][0][1]
        ends[replica] = end
        heapq.heapreplace(heaps[kind], (end, replica))
    return ends, chosen


def _polished(rows: Floats, kind_of: Ints, ends: Floats, chosen: Ints) -> _Dealing:
    """The dealing after moves and swaps out of the replica that ends last; it is changed in place."""
    own_s, num_kinds = rows[np.arange(len(rows)), kind_of[chosen]], rows.shape[1]
    most = int((_PAIRS / (_REACH * num_kinds)) ** 0.5)
    for _ in range(_MOVES * (64 + len(kind_of))):
        last, by_end = int(ends.argmax()), np.argsort(ends, kind="stable")
        others = np.concatenate([by_end[kind_of[by_end] == kind][:_REACH] for kind in range(num_kinds)])
        others = others[others != last]
        out = _some(np.flatnonzero(chosen == last), most)
        back = _some(np.flatnonzero(np.isin(chosen, others)), most * len(others))
        # A move is a swap against nothing: every other replica offers a sequence that takes no time.
        there = np.concatenate([others, chosen[back]])
        here_s, there_s = (
            np.concatenate([np.zeros(len(others)), each]) for each in (rows[back, kind_of[last]], own_s[back])
        )
        ours = ends[last] - own_s[out][:, None] + here_s
        theirs = ends[there] - there_s + rows[out][:, kind_of[there]]
        after = np.maximum(ours, theirs)
        if after.min(initial=np.inf) >= ends[last] * (1 - 1e-9):
            break
        row, column = divmod(int(after.argmin()), after.shape[1])
        other, changes = int(there[column]), [(int(out[row]), int(there[column]))]
        ends[last], ends[other] = ours[row, column], theirs[row, column]
        if column >= len(others):
            changes.append((int(back[column - len(others)]), last))
        for sequence, replica in changes:
            chosen[sequence], own_s[sequence] = replica, rows[sequence, kind_of[replica]]
    return ends, chosen


def _some(items: Ints, count: int) -> Ints:
    """About so many of the items, evenly spread."""
    return items[:: -(-len(items) // count)] if len(items) > count else items


def _searched(rows: Floats, fixed_s: Floats, kind_of: Ints, prices: Floats, known: _Dealing) -> _Dealing:
    """The dealing of few sequences that ends first, of those seen in `_NODES` steps and the known one: depth first, the
    replica that ends first with a sequence first, but for branches that by the prices end no sooner than the best."""
    price, kinds, seconds = prices[kind_of].tolist(), kind_of.tolist(), rows.tolist()
    rest_s = [*np.cumsum((rows * prices).min(axis=1)[::-1])[::-1].tolist(), 0.0]
    best_s, stack = float(known[0].max()), [(fixed_s[kind_of].tolist(), list[int]())]
    for _ in range(_NODES):
        if not stack:
            break
        ends, chosen = stack.pop()
        at = len(chosen)
        if max(*ends, sum(map(mul, price, ends)) + rest_s[at]) >= best_s * (1 - 1e-9):
            continue
        if at == len(seconds):
            best_s, known = max(ends), (np.array(ends), np.array(chosen, dtype=np.int64))
            continue
        unlike = {(kind, end): replica for replica, (kind, end) in enumerate(zip(kinds, ends, strict=True))}
        further = sorted(((end + seconds[at][kind], replica) for (kind, end), replica in unlike.items()), reverse=True)
        stack += [([*ends[:replica], end, *ends[replica + 1 :]], [*chosen, replica]) for end, replica in further]
    return known
