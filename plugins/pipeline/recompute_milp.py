"""The least cost at which rows fit: an integer program, and a quick answer where it is too large or PuLP is missing.

    minimise  sum_d w_d C_d     with     held_r(C) <= room  for every row r,     0 <= C_d <= L, integer

(InfiniPipe, arXiv 2509.21275, Alg. 2, Eq. 15-20; rows and columns: `rows.Rows`; w_d: seconds that a layer costs.)

The quick answer starts with all layers of all columns and lowers one column after the other as far as rows allow, those
first that save little for what they cost. With PuLP and HiGHS the program is solved without "integer", rounded up and
lowered likewise; that is within `GAP` of the optimum unless few layers are needed, and then the integers are searched.

Every rank of a job plans by itself and must find the same, so nothing is cut off by a clock: a program of too many
numbers is not tried, and a search ends after so many nodes. The solver's status is not read: its answer is held to
the rows, and taken only if it fits. A solver that raises has none. Other versions of it may find another one as good.

Rows are linear but for a running micro-batch's own first layer, which saves nothing. They are written for c >= 1, which
is on the safe side for c = 0.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...core.aliases import Floats, Ints
from .memory_rows import MemoryRows

logger = logging.getLogger("evenload")

GAP = 0.02
"""Share of the cost by which an answer may miss the best one (InfiniPipe's own gap)."""
_NODES = 16
_RELAXED_PER_MS, _SEARCHED_PER_MS = 400, 100
"""Numbers in the matrix of a program that is solved in a millisecond without integers, with them. 2,600 to 43,000 took
16 to 105 ms and 37 to 310 ms on one core; the latter hardly depends on how many they are."""
_ALIKE = 1e-9
"""Of a layer's bytes, or of seconds: what sums of floats may differ by, so that machines that add them otherwise still
find the same."""


def alike(seconds: Any, least: Any) -> Any:
    """Whether no more than ``least`` (arrays broadcast), but for rounding."""
    return seconds <= least * (1 + _ALIKE)


def solved(rows: MemoryRows, weights: Floats, layers: int, *, solver_ms: int) -> Ints | None:
    """Layers of each column at which all rows fit, int64 [columns], of least cost; they exist if all layers of all fit.

    None where there is nothing to choose, where the program is too large for ``solver_ms`` (told by its size, not by a
    clock) and without PuLP or HiGHS.
    """
    matrix, need = _linear(rows)
    size = np.count_nonzero(matrix)
    if not size or size > _RELAXED_PER_MS * solver_ms or not (find_spec("pulp") and find_spec("highspy")):
        return None
    values = _values(matrix, need, weights, layers, integer=False)
    values_tried = [] if values is None else [np.ceil(values - 1e-6)]
    least = 0.0 if values is None else float(weights @ values)
    best = _best(rows, weights, layers, values_tried)
    enough = best is not None and float(weights @ best) <= least * (1 + GAP)
    if not enough and size <= _SEARCHED_PER_MS * solver_ms:
        values = _values(matrix, need, weights, layers, integer=True)
        best = _best(rows, weights, layers, [*values_tried, *([] if values is None else [np.rint(values)])])
    return best


def lowered(rows: MemoryRows, weights: Floats, layers: Ints) -> Ints:
    """Layers that fit, int64 [columns], lowered until no column can be lowered further."""
    layers = layers.copy()
    others, own = rows.saves @ layers, rows.of_own(layers)
    by_own: dict[int, list[int]] = {}
    for row, column in enumerate(rows.own.tolist()):
        by_own.setdefault(column, []).append(row)
    worth = rows.saves.sum(axis=0) / np.maximum(weights, 1e-30)
    order = np.argsort(np.round(worth / max(float(worth.max(initial=0.0)), 1e-30), 9), kind="stable")
    for column in order[layers[order] > 0].tolist():
        saves = rows.saves[:, column]
        waits = np.flatnonzero(saves)
        slack = rows.budget_bytes - own[waits] + others[waits]
        fewer = math.floor((slack / saves[waits]).min() + _ALIKE) if len(waits) else int(layers[column])
        least = max([0, int(layers[column]) - fewer, *(_least(rows, r, others[r]) for r in by_own.get(column, ()))])
        if least < layers[column]:
            others -= saves * (layers[column] - least)
            layers[column] = least
            own = rows.of_own(layers)
    return layers


def _least(rows: MemoryRows, row: int, others: float) -> int:
    """The fewest layers of its own with which a row fits, when the others save so much; it fits with some number."""
    none, one, _ = rows.levels[:, row]
    save = float(rows.own_saves[row])
    if none - others - rows.budget_bytes <= _ALIKE * save:
        return 0
    return 1 + max(0, math.ceil(float(one - others - rows.budget_bytes) / save - _ALIKE))


def _best(rows: MemoryRows, weights: Floats, layers: int, values_tried: list[Floats]) -> Ints | None:
    """The cheapest of those that fit, lowered."""
    whole = [np.clip(values, 0, layers).astype(np.int64) for values in values_tried]
    fitting = [lowered(rows, weights, choice) for choice in whole if rows.fit(choice)]
    costs = [float(weights @ choice) for choice in fitting]
    return next((choice for choice, cost in zip(fitting, costs, strict=True) if alike(cost, min(costs))), None)


def _linear(rows: MemoryRows) -> tuple[Floats, Floats]:
    """Bytes that a layer of each column saves in each row, float64 [R', columns], and that must be, float64 [R']."""
    _, one, every = rows.levels
    with_own = np.flatnonzero(rows.own >= 0)
    matrix, need = rows.saves.copy(), one - rows.budget_bytes
    matrix[with_own, rows.own[with_own]] = rows.own_saves[with_own]
    need[with_own] += rows.own_saves[with_own]
    # However many of its own are recomputed, one of them runs.
    more = with_own[every[with_own] > rows.budget_bytes]
    return np.concatenate([matrix, rows.saves[more]]), np.concatenate([need, every[more] - rows.budget_bytes])


def _values(matrix: Floats, need: Floats, weights: Floats, layers: int, *, integer: bool) -> Floats | None:
    """What HiGHS finds, float64 [columns]; None if that is nothing."""
    try:
        values = _asked(matrix, need, weights, layers, integer=integer)
    except Exception as error:
        logger.warning("pipeline: the solver failed, the quick answer stands: %s: %s", type(error).__name__, error)
        return None
    return None if any(value is None for value in values) else np.array(values, dtype=np.float64)


def _asked(matrix: Floats, need: Floats, weights: Floats, layers: int, *, integer: bool) -> list[float | None]:
    import pulp

    problem = pulp.LpProblem("layers", pulp.LpMinimize)
    choice = [pulp.LpVariable(f"c{d:05d}", 0, layers, cat="Integer") for d in range(len(weights))]
    problem += _sum(pulp, choice, weights / (float(weights.mean()) or 1.0))
    for row, bytes_ in zip(matrix, need.tolist(), strict=True):
        terms = np.flatnonzero(row)
        problem += _sum(pulp, [choice[d] for d in terms], row[terms] / bytes_) >= 1
    limits = {"mip_max_nodes": _NODES, "random_seed": 0, "mip_heuristic_run_feasibility_jump": False}
    solver = pulp.HiGHS(mip=integer, msg=False, threads=1, gapRel=GAP, **limits)
    with suppress(KeyError):  # PuLP 3.3 has read the values by then, but has no name for "node limit reached"
        problem.solve(solver)
    return [one.value() for one in choice]


def _sum(pulp: Any, choice: list[Any], factors: Floats) -> Any:
    return pulp.LpAffineExpression(zip(choice, factors.tolist(), strict=True))
