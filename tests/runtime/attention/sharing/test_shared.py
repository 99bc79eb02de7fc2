"""Attention that ranks share against explicit softmax over whole sequences: float64, real gloo ranks, any plan."""

import pytest
from harness.cases import full, only_full

from . import shared_jobs as jobs

pytestmark = pytest.mark.slow
micro_batch = jobs.micro_batch

LENGTHS = [61, 8, 5, 17]
A, B, C = [0, 0, 20], [0, 20, 33], [0, 33, 61]
ENGINES = ["ring", "all_gather", "all_to_all", "hybrid"]


def judged(results, lengths):
    """The worst errors of out, dq, dk and dv over all ranks, which together ran every token."""
    assert sum(ran for _, ran in results) == sum(lengths)
    return dict(zip(("out", "dq", "dk", "dv"), map(max, zip(*(e for e, _ in results), strict=True)), strict=True))


def check(world, lengths, rows, num_ranks, heads=(4, 2), node_ranks=0, bound=1e-12, **how):
    worst = judged(world(num_ranks).run(jobs.run_rows, lengths, rows, num_ranks, heads, node_ranks, how), lengths)
    assert max(worst.values()) < bound, worst


def sliced(cp_comm, cp_groups, ranks, **more):
    """Three micro-batches: slices of sequence 0 in each, on the first CP group; the other sequences beside them."""
    own = {"cp_groups": cp_groups, **more}
    return [
        micro_batch([A, [1, 0, 8], [3, 0, 17]], ranks, cp_comm, **own),
        micro_batch([B], cp_groups[0], cp_comm, **more),
        micro_batch([[2, 0, 5], C], ranks, cp_comm, **{**own, "cp_groups": [cp_groups[1], cp_groups[0]]}),
    ]


@pytest.mark.parametrize(
    ("cp_comm", "remap"), [(engine, True) for engine in ENGINES] + [only_full(engine, False) for engine in ENGINES]
)
def test_slices_of_a_shared_sequence(world, cp_comm, remap):
    more = {"ulysses_degree": 2 if cp_comm == "hybrid" else 0, "remap": remap}
    check(world, LENGTHS, sliced(cp_comm, [[1, 0, 3, 2], [1], [3, 2]], [0, 1, 2, 3], **more), 4, (6, 2))


@pytest.mark.parametrize("cp_comm", ["ring", "all_gather", "hybrid"])
def test_messages_between_nodes_are_spread(world, cp_comm):
    more = {"routed": True, "ulysses_degree": 2 if cp_comm == "hybrid" else 0}
    check(world, LENGTHS, sliced(cp_comm, [[1, 3, 2, 0], [1], [2, 3]], [0, 1, 2, 3], **more), 4, (6, 2), node_ranks=2)
    if cp_comm != "hybrid":
        check(world, [41], [micro_batch([[0, 0, 41]], [2, 0, 3], cp_comm, **more)], 4, node_ranks=2)


@pytest.mark.parametrize(
    ("cp_comm", "mode"),
    [
        pytest.param(cp_comm, mode, marks=() if row == column else full)
        for row, cp_comm in enumerate(ENGINES[:3])
        for column, mode in enumerate(("reentrant", "non-reentrant", "replayed"))
    ],
)
def test_a_forward_that_runs_again(world, cp_comm, mode):
    check(world, LENGTHS, sliced(cp_comm, [[1, 0, 2], [1], [0, 2]], [0, 1, 2]), 3, (8, 2), mode=mode)


def test_half_precision(world):
    rows = sliced("ring", [[1, 0, 3, 2], [1], [3, 2]], [0, 1, 2, 3])
    check(world, LENGTHS, rows, 4, bound=2.5e-2, dtype="bfloat16")


@pytest.mark.parametrize(("num_ranks", "seeds"), [(3, range(10)), (4, [*range(8), 13, 9]), only_full(4, range(10, 40))])
def test_random_plans_on_ranks_that_are_late_by_chance(world, num_ranks, seeds):
    """Of every engine, numbers of heads, groups that grow from slice to slice, padding, and forwards that run again,
    also where a rank attends for none of the tokens it holds (seed 13, under a checkpoint of attention alone)."""
    results = world(num_ranks).run(jobs.run_drawn, list(seeds), num_ranks)
    for name, (_, lengths) in results[0].items():
        worst = judged([result[name][0] for result in results], lengths)
        assert max(worst.values()) < 1e-12, (name, worst)


@pytest.mark.parametrize(
    ("mutant", "cp_comm"),
    [
        ("lost hop", "ring"),
        ("gradients that stay away", "ring"),
        ("gradients that stay away", "all_gather"),
        ("other heads", "all_to_all"),
        ("dropped prefix", "ring"),
        ("unsettled prefix", "ring"),
        ("chunks in disorder", "all_gather"),
    ],
)
def test_mutants_are_caught(world, mutant, cp_comm):
    rows = sliced(cp_comm, [[1, 0, 2], [1], [0, 2]], [0, 1, 2])
    found = world(3).run(jobs.run_mutant, mutant, LENGTHS, rows, 3, [6, 6], 0)
    assert max(map(max, found)) > 1e-4


def test_ranks_meet_before_a_pass(world):
    assert world(3).run(jobs.meets, [4, 4, 4], "BBB") == ["", "", ""]
    told = world(3).run(jobs.meets, [4, 4, 7], "FFF")
    assert all("run different passes" in text for text in told)
    assert "rank 0: F4 of plan 303132333435; rank 2: F7 of plan 303132333435" in told[0]
    told = world(3).run(jobs.meets, [4, 4, 4], "FBF")
    assert "rank 1: B4 of plan 303132333435; rank 0: F4 of plan 303132333435" in told[1]
