"""Disjoint groups against FlexSP's integer program, solved to the end: never below it, seldom above."""

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import pulp
import pytest
from evenload.plugins.mesh.candidates.disjoint_groups import Table, groups_of, places_of, seconds_of
from hypothesis import assume, given
from hypothesis import strategies as st

_SCRIPT = Path(__file__).parents[4] / "benchmarks" / "planning" / "disjoint_bound.py"
_spec = importlib.util.spec_from_file_location("bound", _SCRIPT)
bound = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bound)

RANKS, NODE = 8, 4
CAP = 512
DEGREES = np.array([1, 2, 4, 8])
RATE = np.array([np.inf, 4e6, 3e6, 2.5e5])
"""Tokens a second of an all-to-all by degree; slow across nodes, as in FlexSP's cluster."""


def table_of(lengths):
    """1 microsecond a token and 2 ns a pair, so attention equals the rest at 1,000 tokens."""
    n = np.array(lengths, dtype=np.float64)[:, None]
    return Table(DEGREES, (1e-6 * n + 1e-9 * n * n) / DEGREES + n / DEGREES / RATE)


def optimum_of(lengths, table):
    """FlexSP, arXiv 2412.01523, equations 5 to 10, over one virtual group for each that could be; None: infeasible."""
    virtual = [(j, int(d)) for j, d in enumerate(DEGREES) for _ in range(RANKS // int(d))]
    problem = pulp.LpProblem("flexsp", pulp.LpMinimize)
    time = pulp.LpVariable("time", 0)
    used = [pulp.LpVariable(f"used{g}", cat="Binary") for g in range(len(virtual))]
    put = [[pulp.LpVariable(f"put{k}_{g}", cat="Binary") for g in range(len(virtual))] for k in range(len(lengths))]
    problem += time
    problem += pulp.lpSum(d * u for (_, d), u in zip(virtual, used, strict=True)) <= RANKS
    for row in put:
        problem += pulp.lpSum(row) == 1
    for g, (j, d) in enumerate(virtual):
        problem += pulp.lpSum(1e3 * float(table.seconds[k, j]) * row[g] for k, row in enumerate(put)) <= time
        problem += pulp.lpSum(n * row[g] for n, row in zip(lengths, put, strict=True)) <= d * CAP
        for row in put:
            problem += row[g] <= used[g]
        if g and virtual[g - 1] == (j, d):  # groups of a degree are alike
            problem += used[g] <= used[g - 1]
    problem.solve(pulp.HiGHS(msg=False, threads=1, mip_rel_gap=1e-6))
    status = problem.solverModel.getModelStatus().name
    assert status in ("kOptimal", "kInfeasible")  # no limit is set, so nothing else is an answer
    return float(time.value()) / 1e3 if status == "kOptimal" else None


def seconds(groups, table):
    return float(seconds_of(groups, table).max())


@cache
def drawn():
    """Heavy-tailed micro-batches of 6 to 13 sequences, half to almost full, and their proven optima."""
    random, cases = np.random.default_rng(9), []
    while len(cases) < 8:
        drawn = np.clip(random.lognormal(4.8, 1.3, int(random.integers(6, 14))), 16, RANKS * CAP)
        lengths = drawn.astype(int).tolist()
        if 0.5 * RANKS * CAP <= sum(lengths) <= 0.97 * RANKS * CAP:
            best = optimum_of(lengths, table_of(lengths))
            if best is not None:
                cases.append((lengths, table_of(lengths), best))
    return cases


@pytest.mark.slow
def test_groups_are_within_three_per_cent_of_the_optimum_and_never_below():
    found = [seconds(groups_of(np.array(n), table, RANKS, CAP, NODE), table) for n, table, _ in drawn()]
    best = [optimum for _, _, optimum in drawn()]
    assert all(f >= b * (1 - 1e-6) for f, b in zip(found, best, strict=True))
    assert sum(found) <= 1.03 * sum(best)


@pytest.mark.slow
def test_the_bound_of_a_micro_batch_holds_and_is_close():
    bounds = [
        bound.micro_batch_bound_s(
            np.array(n), table, RANKS, CAP, seconds(groups_of(np.array(n), table, RANKS, CAP), table)
        )
        for n, table, _ in drawn()
    ]
    best = [optimum for _, _, optimum in drawn()]
    assert all(low <= b * (1 + 1e-6) for low, b in zip(bounds, best, strict=True))
    assert sum(bounds) >= 0.9 * sum(best)


def test_a_solver_that_gives_up_refuses_nothing():
    """With no nodes at all the bound may be weak, but what was found is not called impossible."""
    lengths, table = [900, 700, 300, 200, 100, 90, 80], table_of([900, 700, 300, 200, 100, 90, 80])
    known = seconds(groups_of(np.array(lengths), table, RANKS, CAP), table)
    weak, strong = (bound.micro_batch_bound_s(np.array(lengths), table, RANKS, CAP, known, nodes) for nodes in (0, 500))
    assert weak <= strong * (1 + 1e-3)
    assert strong <= known


LENGTHS = st.lists(st.integers(1, RANKS * CAP), min_size=1, max_size=40)


@given(LENGTHS, st.sampled_from([CAP, 4 * CAP, 64 * CAP]))
def test_groups_are_lawful(lengths, cap):
    table = table_of(lengths)
    groups = groups_of(np.array(lengths), table, RANKS, cap, NODE)
    if groups is None:
        assert sum(lengths) > 0.25 * RANKS * cap  # only where room is scarce
        return
    ranks = [rank for group in groups for rank in group.ranks]
    assert len(set(ranks)) == len(ranks)
    assert set(ranks) <= set(range(RANKS))
    assert sorted(k for group in groups for k in group.sequences) == list(range(len(lengths)))
    for group in groups:
        assert sum(lengths[k] for k in group.sequences) <= cap * len(group.ranks)
        assert len(group.ranks) in DEGREES
        if len(group.ranks) <= NODE:
            assert len({rank // NODE for rank in group.ranks}) == 1


@given(LENGTHS)
def test_mixing_degrees_is_no_slower_than_the_best_one_degree(lengths):
    table, n = table_of(lengths), np.array(lengths)
    alone = [Table(DEGREES[j : j + 1], table.seconds[:, j : j + 1]) for j in range(len(DEGREES))]
    single = [(groups_of(n, one, RANKS, CAP), one) for one in alone]
    fastest = min((seconds(groups, one) for groups, one in single if groups is not None), default=None)
    assume(fastest is not None)
    assert seconds(groups_of(n, table, RANKS, CAP), table) <= fastest * (1 + 1e-9)


def test_degrees_need_not_be_powers_of_two():
    """Six ranks, a sequence worth five of them and one worth one; what all six share costs a second more."""
    degrees = np.array([1, 2, 3, 5, 6])
    table = Table(degrees, np.array([[50.0], [10.0]]) / degrees + (degrees == 6))
    groups = groups_of(np.array([50, 10]), table, 6, 100)
    assert {len(group.ranks): group.sequences for group in groups} == {5: (0,), 1: (1,)}


def test_places_keep_small_groups_inside_nodes():
    assert places_of([6, 2, 3, 1], 12, 4) == [(0, 1, 2, 3, 4, 5), (6, 7), (8, 9, 10), (11,)]
    assert places_of([3, 3, 2], 8, 4) is None
    assert places_of([3, 3, 2], 8) == [(0, 1, 2), (3, 4, 5), (6, 7)]
