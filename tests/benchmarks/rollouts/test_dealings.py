"""The benchmark of dealings (benchmarks/rollouts/dealings.py), on few short samples."""

from __future__ import annotations

import json

import pytest

COSTS = """
source: a test
forward: {token_s: 1.0e-6}
backward: {token_s: 2.0e-6}
decode: {step_s: 1.0e-2, row_s: 1.0e-3, key_s: 1.0e-5, prompt_s: 1.0e-6}
"""


@pytest.mark.slow
def test_every_dealing_computes_the_same_samples(ran, tmp_path):
    (tmp_path / "c.yaml").write_text(COSTS)
    words = ("--costs", "c.yaml", "--prompts", 3, "--samples", 3, "--limit", 24, "--every", 4, "--draws", 1)
    result = json.loads(ran("rollouts/dealings.py", *words, ranks=2, folder=tmp_path).stdout)
    assert [row["name"] for row in result["rows"]] == ["groups", "spread", "tie", "spread, moved", "tie, moved"]
    tokens = {sum(row["tokens"]) + row["moved"] for row in result["rows"]}
    assert len(tokens) == 1, "the pass that computes a moved sample again gives its next token"
    for row in result["rows"]:
        assert row["predicted_s"] >= row["bound_s"] > 0
        assert 0 <= row["idle"] < 1
        assert (row["moved"] > 0) <= ("moved" in row["name"])
