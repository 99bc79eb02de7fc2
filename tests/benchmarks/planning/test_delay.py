"""The outlier-delay benchmark, on lengths that take no time."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytestmark = pytest.mark.slow


def test_every_rule_is_measured_and_delay_pays(ran, tmp_path):
    lengths = np.random.default_rng(3).lognormal(6, 1.4, 1600).astype(int).clip(2, 100_000)
    np.savetxt(tmp_path / "lengths.txt", lengths, "%d")
    sizes = ("--size", "32", "--ranks", "4", "--delays", "1,4", "--max-lengths", "65536", "--out", "delay.json")
    assert "predicted" in ran("planning/delay.py", "--lengths", "lengths.txt", *sizes, folder=tmp_path).stdout
    result = json.loads((tmp_path / "delay.json").read_text())
    rows = {(r["rule"], r["max_delay_steps"]): r for r in result["rows"]}
    off = rows.pop(("off", 0))
    assert off["delay_steps"] == off["longest_queue"] == 0
    assert len({rule for rule, _ in rows}) * 2 == len(rows) == len(result["rows"]) - 1
    assert rows["one queue", 4]["step_over_ideal"] < rows["one queue", 1]["step_over_ideal"] < off["step_over_ideal"]
    assert all(0 <= r["delay_steps"] <= most and r["step_over_ideal"] >= 1 for (_, most), r in rows.items())
