"""The moe plugin in real training: what its workloads make popular, and the table of what a run says."""

from __future__ import annotations

import io
from typing import Any

import pytest
from evenload.benchmarks.experts import moe_run
from rich.console import Console


@pytest.mark.parametrize(("workload", "hot"), [("W0", []), ("W1", [5]), ("W2", list(range(8)))])
def test_a_workload_makes_its_experts_popular(workload: str, hot: list[int]) -> None:
    heat = moe_run.heat_of(workload, num_experts=16, ranks=2).exp()
    assert [expert for expert in range(16) if heat[expert] > 1.5] == hot
    assert heat.max().item() == pytest.approx(moe_run.HEAT if hot else 1.0)


def test_the_table_has_a_row_a_variant_and_ratios_of_baselines_alone() -> None:
    path = {"critical_s": 12.5, "evened_experts_s": 10.25, "evened_s": 10.0}
    result: dict[str, Any] = {
        "workload": "W2",
        "ranks": 2,
        "steps": 12,
        "critical_path": {"static": path, "evenload": path},
        "peak_activation_bytes": {"static": 1 << 29, "evenload": 1 << 28},
        "ratio": {"static": {"median": 1.2, "interval": [1.1, 1.3], "allowed": 1.22, "of_allowed": 0.984}},
    }
    console = Console(file=io.StringIO(), width=160)
    console.print(moe_run.table(result))
    static, ours = (line for line in console.file.getvalue().splitlines() if "12.500" in line)
    for word in ("static", "1.200x", "1.100 .. 1.300", "1.220x", "0.984", "10.250", "10.000", "512"):
        assert word in static
    assert "evenload" in ours
    assert "x " not in ours.replace("evenload", "")
