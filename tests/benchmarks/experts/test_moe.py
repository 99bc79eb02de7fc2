"""The benchmark of planners of layers: its loads are what their names say, and its bounds hold."""

from __future__ import annotations

import numpy as np
import pytest
from evenload.benchmarks.experts import moe


@pytest.mark.parametrize("number", range(8))
def test_a_workload_comes_from_its_number_seed_and_step_alone(number: int) -> None:
    counts_RE = moe.workload_counts(number, 1, 3, num_ranks=8, num_experts=32)
    assert (counts_RE == moe.workload_counts(number, 1, 3, num_ranks=8, num_experts=32)).all()
    assert (counts_RE != moe.workload_counts(number, 1, 4, num_ranks=8, num_experts=32)).any()
    tokens_R = counts_RE.sum(axis=1) // moe.TOPK
    assert (counts_RE.sum(axis=1) % moe.TOPK == 0).all()
    assert (counts_RE <= tokens_R[:, None]).all(), "no token meets an expert twice"


def test_workloads_are_what_their_names_say() -> None:
    def by_rank(number: int, step: int = 3) -> list[int]:
        return moe.workload_counts(number, 1, step, 8, 32).sum(axis=0).reshape(8, 4).sum(axis=1).tolist()

    mean = 8 * 1024 * moe.TOPK / 8
    assert max(by_rank(0)) < 1.05 * mean
    assert max(by_rank(2)) > 3 * mean > 2 * mean > max(by_rank(3)), "the same heat, on one rank and spread"
    assert np.argmax(by_rank(6, 4)) == (np.argmax(by_rank(6, 3)) + 1) % 8
    assert max(by_rank(7, 2)) < 1.05 * mean < 2 * mean < max(by_rank(7, 3))
    assert (moe.workload_counts(5, 1, 3, 8, 32).sum(axis=0) == 0).any()


def test_no_planner_needs_fewer_copies_than_the_bound() -> None:
    moe.load_plugins()
    rng = np.random.default_rng(1)
    pairs = [(counts, counts.sum(axis=0)) for counts in (moe.zipf_counts(rng, moe.zipf_shares(rng, 0.9, 32), 8),)]
    rows = {row["planner"]: row for row in moe.rows_of(moe.Case("drawn", pairs), 2)}
    for name in ("clone", "clone, 2 a rank", "moonep"):
        assert rows[name]["ratio"] < 1.0001
        assert rows[name]["copies"] >= rows[name]["least_copies"] > 0
    assert rows["clone, 2 a rank, 1 %"]["copies"] <= rows["clone, 2 a rank"]["copies"]
    assert rows["static"]["copies"] == 0
    assert rows["reroute, now"]["ratio"] <= rows["layout, now"]["ratio"]


def test_a_bound_counts_what_room_and_hot_experts_need() -> None:
    assert moe.least_copies(np.array([[12, 0, 0, 0], [0, 0, 0, 0]]), 1.0) == 1
    assert moe.least_copies(np.array([[12, 0, 0], [0, 0, 0], [0, 0, 0]]), 1.0) == 2
    assert moe.least_copies(np.array([[3, 1], [1, 3]]), 1.0) == 0
