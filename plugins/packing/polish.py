"""A polish of the balance of ranks by an integer program, for those who can wait for the last tenth of a per cent.

The fullest rank and the emptiest ones give back their sequences and get them anew, x_ib in {0, 1}:

    minimise z    with    sum_b x_ib = 1    and    base_db + sum_i w_di x_ib  <=  z C_db

with PuLP and HiGHS. The search is cut off by a number of branch-and-bound nodes and not by a clock, so that every rank
of a job finds the same; its status is not read: what it returns is evaluated, and kept only if it is better.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.balance.level import loads
from ...core.errors import EvenloadError

_RANKS = 4
"""Ranks in one program."""
_ROUNDS = 6


def polish(weights: Floats, capacity: Floats, base: Floats, bins: Ints, nodes: int) -> Ints:
    """Bins at least as even as those given; arguments as for `core.level.level`.

    Raises EvenloadError where PuLP or HiGHS is missing.
    """
    bins = bins.copy()
    for _ in range(_ROUNDS):
        fill = ((base + loads(weights, capacity.shape[1], bins)) / capacity).max(axis=0)
        full = int(fill.argmax())
        chosen = [full, *(int(b) for b in np.argsort(fill, kind="stable") if b != full)][:_RANKS]
        items = np.flatnonzero(np.isin(bins, chosen))
        found = _solve(weights[:, items], capacity[:, chosen], base[:, chosen], nodes)
        if found is None:
            return bins
        after = ((base[:, chosen] + loads(weights[:, items], len(chosen), found)) / capacity[:, chosen]).max()
        if after >= fill[full] * (1 - 1e-6):
            return bins
        bins[items] = np.array(chosen)[found]
    return bins


def _solve(weights: Floats, capacity: Floats, base: Floats, nodes: int) -> Ints | None:
    """The best assignment found; None if there is none."""
    try:
        import pulp
    except ImportError as error:
        raise EvenloadError(
            "plugins.packing.polish_nodes needs PuLP with HiGHS",
            str(error),
            "pip install 'evenload[solver]', or set polish_nodes=0",
        ) from error
    items, bins = range(weights.shape[1]), range(capacity.shape[1])
    problem = pulp.LpProblem("ranks", pulp.LpMinimize)
    fill = pulp.LpVariable("fill", 0)
    put = pulp.LpVariable.dicts("put", (items, bins), cat="Binary")
    problem += fill
    for i in items:
        problem += pulp.lpSum(put[i][b] for b in bins) == 1
    for row, room, held in zip(weights, capacity, base, strict=True):
        for b in bins:
            amount = pulp.lpSum(float(row[i] / room[b]) * put[i][b] for i in items)
            problem += float(held[b] / room[b]) + amount <= fill
    with suppress(KeyError):  # PuLP 3.3 has read the values by then, but has no name for "node limit reached"
        problem.solve(pulp.HiGHS(msg=False, threads=1, mip_max_nodes=nodes, random_seed=0))
    values = [[put[i][b].value() for b in bins] for i in items]
    if any(value is None for row in values for value in row):
        return None
    return np.array([int(np.argmax(row)) for row in values], dtype=np.int64)
