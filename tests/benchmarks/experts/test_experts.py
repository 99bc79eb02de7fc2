"""Benchmarks of experts: loads, bounds of planners, quotas between nodes, and the plugin in real training."""

from __future__ import annotations

import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.benchmarks.experts import between_nodes, moe, moe_run


@pytest.mark.parametrize("number", range(8))
def test_a_workload_comes_from_its_number_seed_and_step_alone(number):
    counts_RE = moe.workload_counts(number, 1, 3, num_ranks=8, num_experts=32)
    assert (counts_RE == moe.workload_counts(number, 1, 3, num_ranks=8, num_experts=32)).all()
    assert (counts_RE != moe.workload_counts(number, 1, 4, num_ranks=8, num_experts=32)).any()
    tokens_R = counts_RE.sum(axis=1) // moe.TOPK
    assert (counts_RE.sum(axis=1) % moe.TOPK == 0).all()
    assert (counts_RE <= tokens_R[:, None]).all(), "no token meets an expert twice"


def test_workloads_are_what_their_names_say():
    def by_rank(number, step=3):
        return moe.workload_counts(number, 1, step, 8, 32).sum(axis=0).reshape(8, 4).sum(axis=1).tolist()

    mean = 8 * 1024 * moe.TOPK / 8
    assert max(by_rank(0)) < 1.05 * mean
    assert max(by_rank(2)) > 3 * mean > 2 * mean > max(by_rank(3)), "the same heat, on one rank and spread"
    assert np.argmax(by_rank(6, 4)) == (np.argmax(by_rank(6, 3)) + 1) % 8
    assert max(by_rank(7, 2)) < 1.05 * mean < 2 * mean < max(by_rank(7, 3))
    assert (moe.workload_counts(5, 1, 3, 8, 32).sum(axis=0) == 0).any()


def test_no_planner_needs_fewer_copies_than_the_bound():
    load_plugins()
    rng = np.random.default_rng(1)
    counts = moe.zipf_counts(rng, moe.zipf_shares(rng, 0.9, 32), 8)
    rows = {row["planner"]: row for row in moe.rows_of(moe.Case("drawn", [(counts, counts.sum(axis=0))]), 2)}
    for name in ("clone", "clone, 2 a rank", "moonep"):
        assert rows[name]["ratio"] < 1.0001
        assert rows[name]["copies"] >= rows[name]["least_copies"] > 0
    assert rows["clone, 2 a rank, 1 %"]["copies"] <= rows["clone, 2 a rank"]["copies"]
    assert rows["static"]["copies"] == 0
    assert rows["reroute, now"]["ratio"] <= rows["layout, now"]["ratio"]


def test_a_bound_counts_what_room_and_hot_experts_need():
    assert moe.least_copies(np.array([[12, 0, 0, 0], [0, 0, 0, 0]]), 1.0) == 1
    assert moe.least_copies(np.array([[12, 0, 0], [0, 0, 0], [0, 0, 0]]), 1.0) == 2
    assert moe.least_copies(np.array([[3, 1], [1, 3]]), 1.0) == 0


@pytest.mark.slow
def test_copies_and_tokens_that_go_once_to_a_node_are_ahead_of_even_routing():
    """The targets of the pages, next to quotas that know no nodes."""
    load_plugins()
    for row in between_nodes.rows_of(64, 1, [0, 4, 12]):
        share = {name: one["share"] for name, one in row["answers"].items()}
        assert share["0 more"] >= 0.995 * max(share["near"], share["blind"])
        assert share["even"] > 1.2 if row["once"] else share["even"] == 1.0
        mild = row["model"].startswith("DeepSeek")
        if row["once"]:
            assert min(share["0 more"], share["12 more"]) >= (1.02 if mild else 1.08)
        elif mild:
            assert share["12 more"] == share["4 more"] == share["0 more"] > 0.87
        else:
            assert share["0 more"] < 0.93 < share["4 more"]
            assert share["12 more"] >= (1.12 if row["keep"] else 0.95)


@pytest.mark.parametrize(("workload", "hot"), [("W0", []), ("W1", [5]), ("W2", list(range(8)))])
def test_a_workload_makes_its_experts_popular(workload, hot):
    heat = moe_run.heat_of(workload, num_experts=16, ranks=2).exp()
    assert [expert for expert in range(16) if heat[expert] > 1.5] == hot
    assert heat.max().item() == pytest.approx(moe_run.HEAT if hot else 1.0)


def test_the_table_has_a_row_a_variant_and_ratios_of_baselines_alone(shown):
    path = {"critical_s": 12.5, "evened_experts_s": 10.25, "evened_s": 10.0}
    result = {
        **{"workload": "W2", "ranks": 2, "steps": 12},
        "critical_path": {"static": path, "evenload": path},
        "peak_activation_bytes": {"static": 1 << 29, "evenload": 1 << 28},
        "ratio": {"static": {"of_totals": 1.2, "interval": [1.1, 1.3], "allowed": 1.22, "of_allowed": 0.984}},
    }
    static, ours = (line for line in shown(moe_run.table(result)).splitlines() if "12.500" in line)
    for word in ("static", "1.200x", "1.100 .. 1.300", "1.220x", "0.984", "10.250", "10.000", "512"):
        assert word in static
    assert "x " not in ours.replace("evenload", "")
