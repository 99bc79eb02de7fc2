"""Benchmarks of sparse scoring, on few tokens of a model that has learned nothing."""

from __future__ import annotations


def test_a_row_for_each_chooser_and_overlaps_of_the_same_weights_are_whole(benchmark):
    """Without a learning rate every validation chooses what the first one chose."""
    few = ("--layers", 1, "--hidden", 16, "--tokens", 1024, "--steps", 2, "--every", 1, "--last", 2, "--lr", 0.0)
    words = (*few, "--validated", 1088, "--lengths", 1088, 1536)
    result = benchmark("sparse/structure.py", *words, trainer="deepspeed")
    assert [row["step"] for row in result["overlaps"]] == [0, 1, 2]
    for row in result["overlaps"][1:]:
        assert row["before"] == row["first"] == 1.0 > row["chance"]
        assert row["stale"] == row["stale_first"] == row["error"]
    pairs = {(row["mass"], row["chooser"]): row["pairs"] for row in result["errors"]}
    for mass in (0.8, 0.9, 0.95):
        equal = {round(pairs[mass, name], 12) for name in ("kept", "window", "random", "antidiagonals")}
        assert len(equal) == 1, "equal work"
    assert all(abs(row["error"]) < 0.01 for row in result["errors"])


def test_a_row_for_each_variant_and_share_of_pairs(benchmark):
    words = ("--lengths", 2048, "--repeats", 1, "--layers", 1, "--hidden", 16)
    rows = {row["variant"]: row for row in benchmark("sparse/passes.py", *words, trainer="deepspeed")["rows"]}
    assert set(rows) == {"dense", "again", "sample 0.5", "kept 0.5", "sample 0.25", "kept 0.25"}
    assert rows["dense"]["pairs"] == rows["again"]["pairs"] == 1.0
    assert rows["sample 0.25"]["pairs"] == rows["kept 0.25"]["pairs"] < rows["kept 0.5"]["pairs"] < 0.8
