"""The published set-ups in quick mode: their structure, physical sanity, and FlexSP's formula by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evenload.benchmarks.published import lengths

SLACK = 1.03
"""evenload's planner weighs compute alone, the steps here hold communication too."""
Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def result_of(benchmark: Callable[..., Any]) -> Run:
    """The JSON of a script, run once."""

    @cache
    def run(name: str) -> dict[str, Any]:
        result: dict[str, Any] = benchmark(f"published/{name}.py", "--quick")
        assert result["predicted"] is True
        return result

    return run


@pytest.mark.parametrize("name", ["chunkflow"])
def test_a_claim_stands_beside_both_baselines(name: str, result_of: Run) -> None:
    result = result_of(name)
    assert result["rows"]
    for row in result["rows"]:
        assert all(row[key] for key in ("paper", "lengths", "definition"))
        theirs, simple, ours = (row[side]["step_s"] for side in ("theirs", "simple", "ours"))
        assert row["gain"] == pytest.approx(theirs / ours)
        assert row["gain_over_simple"] == pytest.approx(simple / ours)
        assert ours / SLACK <= simple <= theirs, "the strongest of all is at least as fast as the paper's"
        assert all(0 < row[side]["peak_bytes"] <= 8e10 for side in ("theirs", "simple", "ours"))


def test_sparse_passes_come_to_the_gain_of_their_settings(result_of: Run) -> None:
    """By hand: 1 / (11 % + 19 %), and 500 of 600 PFLOPs at 36 %; the needed share gives the published gain."""
    rows = {row["name"].partition(",")[0]: row for row in result_of("sparse")["rows"]}
    assert rows["SALE"]["ideal"] == pytest.approx(1 / 0.3)
    assert rows["AdaSpa"]["ideal"] == pytest.approx(600 / (100 + 500 * 0.36))
    for row in rows.values():
        left = row["needed"] + row["choosing"]
        assert 1 / (1 - row["attention"] * (1 - left)) == pytest.approx(row["published"])


def test_chunks_gain_over_one_sequence_a_micro_batch(result_of: Run) -> None:
    """ChunkFlow's own method, and evenload no slower than it."""
    (row,) = result_of("chunkflow")["rows"]
    assert row["more"]["chunks"]["gain"] > 1.5
    assert row["ours"]["step_s"] <= row["more"]["chunks"]["step_s"] * SLACK


def test_wlb_llm_evens_micro_batches(result_of: Run) -> None:
    (row,) = result_of("wlb_llm")["rows"]
    variants = row["variants"]
    assert set(variants) == {"theirs", "whole", "slices", "ours", "delay 4"}
    assert variants["theirs"]["imbalance"] > 1.1
    assert variants["slices"]["imbalance"] < 1.05
    assert variants["ours"]["tokens_per_s"] >= variants["slices"]["tokens_per_s"]
    for name, variant in variants.items():
        gain = variant["tokens_per_s"] / variants["theirs"]["tokens_per_s"]
        assert row["gain"][name] == pytest.approx(gain)


def test_flexsp_is_ordered_and_sp64_follows_its_formula(result_of: Run) -> None:
    (row,) = result_of("flexsp")["rows"]
    seconds = row["seconds"]
    assert row["static_degree"] == 64
    assert seconds["SP64"] == seconds["static"]
    assert seconds["SP64"] >= seconds["BatchAda"] >= seconds["each"] > 0
    assert seconds["evenload"] >= seconds["evenload, per batch"]
    assert seconds["evenload, per batch"] <= seconds["BatchAda"] * 1.05
    # Degrees inside a micro-batch are what FlexSP adds to one degree for each.
    assert seconds["mesh, Ulysses"] <= seconds["each"]
    assert seconds["mesh"] <= seconds["each"]
    # galvatron/flexsp_solver/solver.py: a1 s^2 + a2 s + b1 in ms, all-to-all of 4 * 2 * L * h * s * 2 bytes over GB/s.
    a1, a2, b1, layers, hidden, rate = 5.128e-6, 0.18396, 629.4, 32, 4096, 4.87
    by_hand = []
    for tokens, squares, micro_batches in zip(row["tokens"], row["squares"], row["micro_batches"], strict=True):
        compute_ms = (a1 * squares + a2 * tokens) / 64 + b1 * micro_batches
        moved_ms = 4 * 2 * layers * hidden * tokens * 2 / 2**20 / 64 / rate
        by_hand.append((compute_ms + moved_ms) / 1e3)
    assert seconds["SP64"] == pytest.approx(sum(by_hand) / len(by_hand), rel=0.1)


def test_bytescale_balances_what_naive_degrees_leave(result_of: Run) -> None:
    result = result_of("bytescale")
    (row,) = result["rows"]
    seconds = {name: column["step_s"] for name, column in row["columns"].items()}
    assert seconds["static"] >= seconds["simple"]
    assert seconds["static"] > seconds["naive"] > seconds["mesh"]
    assert seconds["ring"] >= seconds["mesh"] > 0
    assert row["gain"]["mesh"] == pytest.approx(seconds["static"] / seconds["mesh"])
    assert row["over_naive"]["mesh"] == pytest.approx(seconds["naive"] / seconds["mesh"])
    assert row["columns"]["mesh"]["imbalance"] < row["columns"]["naive"]["imbalance"]
    # ByteScale, section 6: a 312K sequence on 39 ranks hides its ring.
    assert result["ring_312K"] == pytest.approx(1.0, abs=0.02)


def test_zeppelin_adds_up_its_layers(result_of: Run) -> None:
    result = result_of("zeppelin")
    (row,) = result["rows"]
    gain = row["gain"]
    assert gain["TE CP"] == 1
    assert gain["routed"] > 1
    assert gain["engine"] <= gain["+ routing"] <= gain["+ remap"] <= gain["mesh"] * SLACK
    assert gain["mesh"] > gain["hybrid"]
    # Its ring step between nodes: keys and values of 4,096 tokens, two of 3,200 numbers in half precision, on 25 GB/s.
    assert result["hop_ms"]["plain"] == pytest.approx(1e3 * 4096 * 2 * 3200 * 2 / 2.5e10, rel=0.02)
    assert result["hop_ms"]["routed"] < result["hop_ms"]["plain"] / 2


def test_infinipipe_has_every_system_and_is_ordered(result_of: Run) -> None:
    (row,) = result_of("infinipipe")["rows"]
    columns = row["columns"]
    assert set(columns) == {"Megatron", "DeepSpeed", "FlexSP", "Seq1F1B", "Alg. 1", "evenload", "own states"}
    assert all("failed" not in column for column in columns.values())
    seconds = {name: column["step_s"] for name, column in columns.items()}
    assert seconds["DeepSpeed"] > seconds["FlexSP"]
    assert seconds["Seq1F1B"] > seconds["Alg. 1"] >= seconds["evenload"] * 0.999
    assert seconds["own states"] >= seconds["evenload"] * 0.99
    assert row["gain"]["Seq1F1B"] == pytest.approx(seconds["Seq1F1B"] / seconds["evenload"])
    assert columns["evenload"]["micro_batch_imbalance"] < columns["Seq1F1B"]["micro_batch_imbalance"]
    assert all(0 < column["peak_bytes"] <= 0.9 * 8e10 * (1 + 1e-9) for column in columns.values())
    # Recomputed as published: 20 of Megatron's 40 layers, none of DeepSpeed's.
    assert columns["Megatron"]["recompute_frac"] > 0.1
    assert columns["DeepSpeed"]["recompute_frac"] == columns["FlexSP"]["recompute_frac"] == 0


def test_ultraep_is_reached_in_a_rack_and_static_beaten_between_nodes(result_of: Run) -> None:
    rows = result_of("ultraep")["rows"]
    assert [bool(row["paper"]) for row in rows] == [True] * 3 + [False] * 3
    for row in rows:
        share, even, columns = row["share"], row["even"], row["columns"]
        assert columns["clone"]["imbalance"] == pytest.approx(1.0, abs=0.01)
        assert share["static"] < share["again"] <= share["clone"] < 1
        assert share["clone"] > row["paper"].get("ultraep", 0.88)
        parts = sum(columns["clone"][name] - even.get(name, 0) for name in ("tokens", "copies", "gradients", "experts"))
        assert columns["clone"]["layer"] == pytest.approx(even["layer"] + parts + columns["clone"]["counts"])
        assert columns["again"]["copies"] > columns["clone"]["copies"] > 0
    # Its published layer: 1.89 ms of experts and 1.68 ms of all-to-all forward, 2.83 ms of other.
    assert rows[1]["even"]["layer"] == pytest.approx(3 * 1.89 + 2 * 1.68 + 3 * 2.83)
    assert rows[1]["columns"]["static"]["experts"] == pytest.approx(
        3 * 1.89 * rows[1]["columns"]["static"]["imbalance"]
    )


def test_laer_is_not_ahead_under_the_same_costs(result_of: Run) -> None:
    rows = result_of("laer")["rows"]
    assert len(rows) == 6
    for row in rows:
        seconds, paper = row["seconds"], row["paper"]
        assert row["even_s"] < seconds["clone"] < 0.85 * seconds["LAER"] < seconds["static"]
        assert seconds["clone"] < seconds["rules"]
        assert row["step_s"] == pytest.approx(paper["LAER"] - seconds["LAER"] + seconds["clone"])
        assert 0.15 < row["explained"] < 0.45
    # Shipped: 36.2 and 27.1 s; 65,536 routed tokens of a rank in each of 32 layers, 6.1 ms for 4,096 and twice as much
    # backward, are 9.4 s; their all-to-alls inside a node 0.3 s.
    assert rows[0]["paper"]["static"] == pytest.approx(36.2, abs=0.05)
    assert rows[0]["even_s"] == pytest.approx(3 * 32 * 16 * 6.1e-3 + 0.3, abs=0.1)


def test_replicas_of_lobra_are_ordered(result_of: Run) -> None:
    alike, unlike = result_of("lobra")["rows"]
    seconds = alike["seconds"]
    assert seconds["LobRA"] <= seconds["buckets"] * (1 + 1e-9)
    assert seconds["buckets"] < seconds["padded"]
    assert seconds["one shape"] < seconds["buckets"], "packs hold no padding"
    # Half of the cards have half the rate: equal shares take 2 / 1.5 of what is dealt by speed, or a little less.
    assert unlike["seconds"]["ours"] * 1.2 < unlike["seconds"]["one shape"]
    assert unlike["seconds"]["by speed"] >= unlike["seconds"]["ours"] / SLACK


def test_buckets_pad_least() -> None:
    tokens = np.array([16, 16, 20, 100, 300, 310])
    assert lengths.into_buckets(tokens, 1).tolist() == [320] * 6
    assert lengths.into_buckets(tokens, 3).tolist() == [32, 32, 32, 112, 320, 320]
    assert lengths.into_buckets(tokens, 99).tolist() == [16, 16, 32, 112, 304, 320]


def test_stand_ins_meet_the_published_fractions() -> None:
    k = 1024

    def below(name: str, tokens: float) -> float:
        return float((lengths.drawn(name, 400_000) <= tokens).mean())

    # ByteScale, section 3.1: Byted and GitHub.
    assert below("byted-like", 4 * k) == pytest.approx(0.8, abs=0.01)
    assert 1 - below("byted-like", 128 * k) == pytest.approx(0.01, rel=0.1)
    assert lengths.tokens_above("byted-like", 128 * k) == pytest.approx(0.443, rel=0.05)
    assert lengths.tokens_above("byted-like", 256 * k) == pytest.approx(0.37, rel=0.05)
    assert lengths.tokens_above("byted-like", 2048 * k) == pytest.approx(0.121, rel=0.05)
    assert lengths.tokens_above("github-like", 128 * k) == pytest.approx(0.162, rel=0.05)
    assert lengths.tokens_above("github-like", 256 * k) == pytest.approx(0.098, rel=0.05)
    # ChunkFlow: shares of sequences.
    assert below("sft-like", k) == pytest.approx(0.9, abs=0.005)
    assert below("sft-like", 4 * k) - below("sft-like", k) == pytest.approx(0.08, abs=0.005)
    assert 0 < 1 - below("sft-like", 32 * k) <= 0.0011
    # FlexSP: more than 96 % of Wikipedia below 8K, the mean of the file 1,004 tokens.
    assert below("wikipedia-like", 8 * k) > 0.96
    assert lengths.drawn("wikipedia-like", 400_000).mean() == pytest.approx(1004, rel=0.05)


def test_draws_are_a_function_of_their_arguments_and_a_file_takes_their_place(tmp_path: Path) -> None:
    first = lengths.drawn("github-like", 100)
    assert (first == lengths.drawn("github-like", 100)).all()
    assert (first != lengths.drawn("github-like", 100, seed=5)).any()
    (tmp_path / "wikipedia.txt").write_text("\n".join(str(40 + 37 * i % 20000) for i in range(600)))
    for name in ("github-like", "wikipedia-like"):
        label, kept = lengths.corpus(name, 1000, 16384, tmp_path / "wikipedia.txt")
        assert label == ("Wikipedia (real)" if name == "wikipedia-like" else name)
        assert len(kept) == 1000
        assert kept.max() <= 16384


def test_shares_of_tokens_agree_with_draws() -> None:
    drawn = lengths.drawn("commoncrawl-like", 2_000_000)
    for threshold in (8192, 32768, 131072):
        share = drawn[drawn > threshold].sum() / drawn.sum()
        assert lengths.tokens_above("commoncrawl-like", threshold) == pytest.approx(float(share), rel=0.03)
