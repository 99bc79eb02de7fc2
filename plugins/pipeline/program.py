"""The least cost at which rows fit: an integer program, and quick answers where it is too large or PuLP is missing.

    minimise  sum_d w_d C_d     with     held_r(C) <= room  for every row r,     0 <= C_d <= L, integer

(InfiniPipe, arXiv 2509.21275, Alg. 2, Eq. 15-20; rows and columns: `rows.Rows`; w_d: seconds that a layer costs.)

Two quick answers come first: the least number of layers that is the same everywhere, and a walk along the passes that
raises, where one does not fit, those that wait longest (which would be best if all saved and cost the same). Both are
then lowered where rows allow it, those first that save little for what they cost. PuLP and HiGHS follow where they are
installed. Every rank of a job plans by itself and must find the same, so nothing is cut off by a clock: a program of
too many numbers is not tried, and a search ends after so many nodes. The solver's status is not read: what it returns is
rounded, held against the rows, and taken only if it fits and costs less.

Rows are linear but for a running micro-batch's own first layer, which saves nothing. Those of micro-batches that the
quick answer recomputes are written for c >= 1, the others for c = 0; both are on the safe side elsewhere.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from ...core.partition import Floats, Ints
from .rows import Rows

_GAP = 0.01
"""Share of the cost by which the search may miss the best answer."""
_VALUES_PER_MS = 500
"""Numbers in the matrix of a program that HiGHS gets through in a millisecond (measured, with the nodes below)."""
_NODES = 16


def solved(rows: Rows, weights: Floats, layers: int, *, solver_ms: int) -> Ints:
    """Layers of each column, int64 [columns]; they fit if all layers of all do.

    ``solver_ms``: what the integer program may take, by its size and not by a clock; 0: quick answers alone.
    """
    quick = [lowered(rows, weights, choice) for choice in (_uniform(rows, layers), _latest_first(rows, layers))]
    best = min(quick, key=lambda choice: float(weights @ choice))
    matrix, need = _linear(rows, best)
    if 0 < np.count_nonzero(matrix) <= _VALUES_PER_MS * solver_ms:
        found = _search(matrix, need, weights, layers)
        if found is not None and rows.fit(found):
            best = min(best, lowered(rows, weights, found), key=lambda choice: float(weights @ choice))
    return best


def lowered(rows: Rows, weights: Floats, layers: Ints) -> Ints:
    """Layers that fit, int64 [columns], lowered until no column can be lowered further."""
    layers = layers.copy()
    others, own = rows.saves @ layers, rows.of_own(layers)
    by_own: dict[int, list[int]] = {}
    for row, column in enumerate(rows.own.tolist()):
        by_own.setdefault(column, []).append(row)
    order = np.argsort(rows.saves.sum(axis=0) / np.maximum(weights, 1e-30), kind="stable")
    for column in order[layers[order] > 0].tolist():
        saves = rows.saves[:, column]
        waits = np.flatnonzero(saves)
        slack = rows.room - own[waits] + others[waits]
        fewer = int((slack / saves[waits]).min()) if len(waits) else int(layers[column])
        least = max([0, int(layers[column]) - fewer, *(_least(rows, r, others[r]) for r in by_own.get(column, ()))])
        if least < layers[column]:
            others -= saves * (layers[column] - least)
            layers[column] = least
            own = rows.of_own(layers)
    return layers


def _least(rows: Rows, row: int, others: float) -> int:
    """The fewest layers of its own with which a row fits, when the others save so much; it fits with some number."""
    none, one, _ = rows.levels[:, row]
    if none - others <= rows.room:
        return 0
    return 1 + max(0, int(np.ceil((one - others - rows.room) / rows.own_saves[row])))


def _uniform(rows: Rows, layers: int) -> Ints:
    low, high, columns = 0, layers, rows.saves.shape[1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if rows.fit(np.full(columns, middle)) else (middle + 1, high)
    return np.full(columns, low, dtype=np.int64)


def _latest_first(rows: Rows, layers: int) -> Ints:
    """Row by row in the order of their own columns, which are taken to be in the order of the backwards."""
    choice = np.zeros(rows.saves.shape[1], dtype=np.int64)
    others = np.zeros(len(rows.own))
    none, one, every = rows.levels
    for row in np.lexsort((-none, rows.own)).tolist():
        own, saves = int(rows.own[row]), rows.saves[row]
        for column in [*np.flatnonzero(saves)[::-1].tolist(), own]:
            mine = int(choice[own]) if own >= 0 else 0
            level = none[row] if not mine else max(one[row] - rows.own_saves[row] * (mine - 1), every[row])
            over = float(level - others[row]) - rows.room
            if over <= 0 or column < 0:
                break
            if column == own:
                raised = max(mine, min(layers, _least(rows, row, others[row])))
            else:
                raised = min(layers, int(choice[column]) + int(np.ceil(over / saves[column])))
            others += rows.saves[:, column] * (raised - choice[column])
            choice[column] = raised
    return choice if rows.fit(choice) else np.full_like(choice, layers)


def _linear(rows: Rows, guess: Ints) -> tuple[Floats, Floats]:
    """Bytes that a layer of each column saves in each row, float64 [R', columns], and that must be, float64 [R']."""
    none, one, every = rows.levels
    with_own = (rows.own >= 0) & (guess[rows.own] > 0)
    matrix = rows.saves.copy()
    at = np.flatnonzero(with_own)
    matrix[at, rows.own[at]] = rows.own_saves[at]
    need = np.where(with_own, one + rows.own_saves, none) - rows.room
    least = every - rows.room
    floor = np.flatnonzero(with_own & (least > 0))
    return np.concatenate([matrix, rows.saves[floor]]), np.concatenate([need, least[floor]])


def _search(matrix: Floats, need: Floats, weights: Floats, layers: int) -> Ints | None:
    """What HiGHS finds, rounded; None if it finds nothing or is not there."""
    try:
        import pulp
    except ImportError:
        return None
    problem = pulp.LpProblem("layers", pulp.LpMinimize)
    choice = [pulp.LpVariable(f"c{d:05d}", 0, layers, cat="Integer") for d in range(len(weights))]
    scale = float(weights.mean()) or 1.0
    problem += pulp.LpAffineExpression(zip(choice, (weights / scale).tolist(), strict=True))
    for row, least in zip(matrix, need.tolist(), strict=True):
        terms = np.flatnonzero(row)
        saved = pulp.LpAffineExpression(zip([choice[d] for d in terms], (row[terms] / least).tolist(), strict=True))
        problem += saved >= 1
    solver = pulp.HiGHS(msg=False, threads=1, gapRel=_GAP, mip_max_nodes=_NODES, random_seed=0)
    with suppress(KeyError):  # PuLP 3.3 has read the values by then, but has no name for "node limit reached"
        problem.solve(solver)
    values = [one.value() for one in choice]
    if any(value is None for value in values):
        return None
    return np.clip(np.rint(np.array(values)), 0, layers).astype(np.int64)
