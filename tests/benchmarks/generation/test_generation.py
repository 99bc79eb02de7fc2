"""Benchmarks of generation, on few tokens of a model that has learned nothing."""

from __future__ import annotations

import json
import sys

from evenload.benchmarks.generation import collect
from harness.cases import full


def test_a_row_for_each_number_of_slots(benchmark):
    words = ("--trainers", "megatron", "--slots", "1", "3", "--prompt", "8", "--tokens", "4", "--repeats", "1")
    rows = benchmark("generation/decode.py", *words)["rows"]
    assert [(row["slots"], row["trainer"]) for row in rows] == [(1, "megatron"), (3, "megatron")]
    for row in rows:
        assert row["step"] > row["model"] > row["products"] > 0
        assert min(row["packing"], row["by_packs"]) > 0
    assert rows[0]["over_one_slot"] == 1.0


def test_drafts_as_long_as_they_pay_next_to_fixed_lengths(benchmark):
    """On text of the standard library, and on samples that say what they said before."""
    (row,) = benchmark("generation/draft_depths.py", "--files", "4", "--slots", "4")["rows"]
    assert [fixed["forwards"] for fixed in row["fixed"]] == sorted((f["forwards"] for f in row["fixed"]), reverse=True)
    assert row["own"]["of_samples"] <= row["fixed"][row["as_few"] - 1]["of_samples"] or not row["fewer_forwards"]
    assert row["over_none"] > 1


@full
def test_a_row_for_each_rule_and_less_work_where_the_first_is_kept(forged, monkeypatch, tmp_path, capsys):
    """Its commands are run in forks."""

    def run(folder, *words):
        done = forged(folder, *words, "--json")
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout), 1.0

    monkeypatch.setattr(collect, "run", run)
    monkeypatch.setattr(sys, "argv", ["collect.py", "--quick", "--json", "--folder", str(tmp_path / "c")])
    collect.main(collect.arguments(), collect.benchmark, collect.table)
    whole, first = json.loads(capsys.readouterr().out)["rows"]
    assert (whole["rule"], first["rule"]) == ("all of 2", "1 of 2")
    assert first["tokens"] <= whole["tokens"]
    assert first["kept_tokens"] <= whole["kept_tokens"]
    assert (whole["collected"], first["collected"]["kept"]) == (None, 3)


def test_a_row_for_each_product_and_card(benchmark):
    words = ("--parts", "products", "cards", "--quick", "--repeats", "1")
    result = benchmark("generation/quantized.py", *words)
    assert [row["rows"] for row in result["products"]] == [1, 4, 16, 64]
    kinds = {"float32", "bfloat16", "packed int8", "packed int4", "restored int8", "restored int4"}
    assert all(row["ms"].keys() == kinds and min(row["ms"].values()) > 0 for row in result["products"])
    for row in result["cards"]:
        half, mixed = row["forms"].values()
        assert half["most"] < mixed["most"]
        assert row["latency"] == mixed["one_s"] / half["one_s"] - 1 < -0.7


@full
def test_drafts_and_rounded_keys_of_a_trained_model(benchmark, tmp_path):
    result = benchmark("generation/quantized.py", "--parts", "accepted", "keys", "--quick", "--folder", tmp_path)
    assert {row["share"] > 0.5 for row in result["accepted"]["rows"]} == {True}
    assert {row["same"] == row["samples"] for row in result["accepted"]["seconds"]} == {True}
    assert [row["keys"] for row in result["keys"]] == ["16 bits", "int8", "int4"]
