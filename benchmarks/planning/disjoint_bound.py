"""A certified lower bound of one micro-batch: no disjoint groups of ranks are all done before it.

It is tighter than `plugins.mesh.bounds` and takes seconds: FlexSP's disjoint groups of one micro-batch, degree by
degree and not group by group. Numbers of groups n_d are integers, the longest sequences go to one degree whole, all
others may be divided (b_k: sequences of that length):

    minimise  sum_d d * n_d    with   sum_d x_kd = b_k,    sum_k f(T(k, d) / C) x_kd <= n_d,
                                      sum_k f(tokens_k / (d * cap)) x_kd <= n_d    for some dual feasible f

A function f is dual feasible if weights that sum to at most 1 have f's that do (Fekete and Schepers, Math. Prog. 2001);
it tells the program that what does not fit together takes groups of its own. C is refused only where the
solver's *dual* bound on the ranks exceeds N: what a solver that ran out of nodes has not found may still exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from evenload.core.aliases import Floats, Ints
from evenload.core.errors import EvenloadError
from evenload.plugins.mesh.bounds import search
from evenload.plugins.mesh.candidates.disjoint_groups import Table

_NODES = 200
"""Branch-and-bound nodes for each time that is tried."""
_WHOLE = 48
"""Longest sequences that go to one degree whole in the integer program."""
_TOLERANCE = 1e-6


def micro_batch_bound_s(
    lengths: Ints, table: Table, num_ranks: int, max_tokens: float, known_s: float, nodes: int = _NODES
) -> float:
    """No disjoint groups of one micro-batch are all done before this [s], launch left out.

    Args:
        lengths: int [K], tokens.
        known_s: seconds of some solution; the bound is at most this.

    Raises EvenloadError where PuLP or HiGHS is missing.
    """
    fits = lengths[:, None] <= table.degrees * max_tokens
    seconds = np.where(fits, table.seconds, np.inf)
    least = max(float((seconds * table.degrees).min(axis=1).sum()) / num_ranks, float(seconds.min(axis=1).max()))
    program = _Program(lengths, seconds, table.degrees, max_tokens)
    return min(
        search(lambda c: c >= known_s or program.ranks(c, num_ranks, nodes) <= num_ranks + _TOLERANCE, least), known_s
    )


class _Program:
    """The integer program of one micro-batch; sequences of equal length are one row."""

    def __init__(self, lengths: Ints, seconds: Floats, degrees: Ints, max_tokens: float) -> None:
        values, first, counts = np.unique(-lengths, return_index=True, return_counts=True)
        self._lengths, self._seconds, self._counts = -values, seconds[first], counts
        self._whole = np.cumsum(counts) <= _WHOLE
        self._degrees, self._cap = degrees, max_tokens
        self._unit = int(np.gcd.reduce(lengths))

    def ranks(self, seconds: float, enough: int, nodes: int) -> float:
        """The solver's dual bound on the ranks that this much time takes."""
        try:
            import pulp
        except ImportError as error:
            do = "pip install PuLP highspy"
            raise EvenloadError("the bound of a micro-batch needs PuLP with HiGHS", str(error), do) from error
        problem = pulp.LpProblem("ranks", pulp.LpMinimize)
        groups = [pulp.LpVariable(f"n{j}", 0, int(enough // d), cat="Integer") for j, d in enumerate(self._degrees)]
        problem += pulp.lpDot([int(d) for d in self._degrees], groups)
        rows, columns = range(len(self._counts)), range(len(self._degrees))
        put = {
            (q, j): pulp.LpVariable(f"x{q}_{j}", 0, int(self._counts[q]), "Integer" if self._whole[q] else "Continuous")
            for q in rows
            for j in columns
            if self._seconds[q, j] <= seconds
        }
        for q in rows:
            own = [put[q, j] for j in columns if (q, j) in put]
            if not own:
                return np.inf
            problem += pulp.lpSum(own) == int(self._counts[q])
        for j, n in enumerate(groups):
            inside = [q for q in rows if (q, j) in put]
            for weights in self._weights(j, inside, seconds):
                problem += pulp.lpDot(weights.tolist(), [put[q, j] for q in inside]) <= n
        with suppress(KeyError):  # PuLP 3.3 has no name for "node limit reached"
            problem.solve(
                pulp.HiGHS(msg=False, threads=1, mip_max_nodes=nodes, random_seed=0, objective_target=float(enough))
            )
        info = problem.solverModel.getInfo()
        return float(info.mip_dual_bound) if problem.solverModel.getModelStatus().name != "kInfeasible" else np.inf

    def _weights(self, column: int, rows: list[int], seconds: float) -> Iterator[Floats]:
        """Rows of weights, each of which sums to at most 1 in any group of this degree."""
        times = self._seconds[rows, column] / seconds
        max_tokens = float(self._degrees[column]) * self._cap
        tokens = self._lengths[rows] / max_tokens
        least = self._seconds[rows, column].min(initial=np.inf) / self._lengths[rows].min(initial=1) * self._unit
        yield from _dual_feasible(times, [seconds / least] if np.isfinite(least) and self._unit > 1 else [])
        if np.isfinite(max_tokens):
            yield from _dual_feasible(tokens, [max_tokens / self._unit] if self._unit > 1 else [])


def _dual_feasible(weights: Floats, scales: list[float]) -> Iterator[Floats]:
    """Of weights in [0, 1]: themselves, counts of those over 1/2, 1/3 ..., large ones as if alone, whole units."""
    weights = weights * (1 - 1e-9)
    yield weights
    for k in range(1, 5):
        yield np.maximum(0.0, np.ceil((k + 1) * weights) - 1) / k
    for small in (0.1, 0.2, 0.3, 0.4):
        yield np.where(weights > 1 - small, 1.0, np.where(weights < small, 0.0, weights))
    for scale in scales:
        if scale >= 1:
            yield np.floor(scale * weights * (1 + 2e-9)) / np.floor(scale * (1 + 2e-9))
