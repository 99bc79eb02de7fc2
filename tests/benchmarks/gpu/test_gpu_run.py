"""`benchmarks/gpu/run.sh` without a GPU: its stages are printed, parse, and end within their limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evenload.api import load_recipe
from evenload.benchmarks.gpu import stages
from harness.cases import full

GPU = Path(stages.__file__).parent
SCRIPTS = ("attention", "slices", "chunks", "ring", "offload", "experts", "adapters", "decode", "transformer_engine")
Measured = Callable[..., Any]


@pytest.fixture
def measured(ran: Callable[..., Any]) -> Measured:
    """What a script of this folder prints on the CPU."""
    return lambda name, *words: json.loads(ran(f"gpu/{name}.py", *words, "--json").stdout)


def test_a_dry_run_prints_every_stage_and_does_nothing(tmp_path: Path) -> None:
    command, environment = [GPU / "run.sh", "--dry-run"], {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for stage in stages.stages():
        assert f"{stage.name}, at most" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_every_stage_asks_for_something_that_exists() -> None:
    """Recipes and overrides are accepted, scripts are there, and the GPU tests are found."""
    found = set()
    for stage in stages.stages():
        words = [word for word in stage.arguments if word != "-P"]
        if words[:3] == ["-m", "evenload", "doctor"]:
            assert "--gpu" in words
            assert stage.limit_s > int(words[words.index("--limit") + 1])
        elif words[:2] == ["-m", "evenload"]:
            overrides = [w for w in words[4:] if "=" in w and not w.startswith("-")]
            recipe = load_recipe(words[3], overrides)
            assert recipe.min_world_size == 1
            found.add((words[2], recipe.trainer))
        elif words[0] != "-m":
            assert Path(words[0]).is_file()
            found.add((Path(words[0]).name, ""))
    assert found == {
        *((verb, trainer) for verb in ("verify", "bench") for trainer in ("megatron", "deepspeed")),
        *((f"{name}.py", "") for name in SCRIPTS),
    }
    assert "tests/integrations/megatron/test_gpu.py" in stages.gpu_tests()


def test_a_stage_keeps_its_json_or_its_text(tmp_path: Path) -> None:
    row = stages.run(stages.Stage("good", ("-c", "print('{\"a\": 1}')"), 20), 20, tmp_path)
    assert (row["exit_code"], row["result"], row["timed_out"]) == (0, {"a": 1}, False)
    row = stages.run(stages.Stage("bad", ("-c", "print('some text'); raise SystemExit('why')"), 20), 20, tmp_path)
    assert row["exit_code"] == 1
    assert "some text" in row["printed"]
    assert "why" in row["stderr"]


@pytest.mark.slow
def test_a_stage_that_hangs_ends_with_all_it_started(tmp_path: Path) -> None:
    child = "import subprocess, sys; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True); c.wait()"
    began = time.monotonic()
    row = stages.run(stages.Stage("hangs", ("-c", child), 3), 3, tmp_path)
    assert row["timed_out"]
    assert row["exit_code"] is None
    assert time.monotonic() - began < 50
    state, end = Path(f"/proc/{int(row['result'])}/stat"), time.monotonic() + 30
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)


def test_only_lacking_wheels_are_installed(tmp_path: Path) -> None:
    for name in ("numpy-99.0", "pydantic_core-9.0", "nosuch_thing-1.0"):
        (tmp_path / f"{name}-py3-none-any.whl").touch()
    assert [wheel.name for wheel in stages.lacking(tmp_path)] == ["nosuch_thing-1.0-py3-none-any.whl"]


def test_the_page_and_the_costs_of_the_card_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stages.costs_name("NVIDIA H200") == "h200"
    assert stages.costs_name("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"
    (tmp_path / "recipes" / "costs").mkdir(parents=True)
    (tmp_path / "hour").mkdir()
    (tmp_path / "hour" / "costs.yaml").write_text("source: x\n")
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    kept = stages.keep(tmp_path / "hour", "h200", tmp_path / "gpu.json")
    assert (tmp_path / "recipes" / "costs" / "h200.yaml").read_text() == "source: x\n"
    assert (tmp_path / "h200.yaml").is_file()
    assert kept[0].endswith("gpu.md: No such file or directory"), "there is no page"
    (tmp_path / "hour" / "page.md").write_text("# page\n")
    stages.keep(tmp_path / "hour", "h200", tmp_path / "gpu.json")
    assert (tmp_path / "gpu.md").read_text() == "# page\n"


def test_attention_is_measured_against_float64(measured: Measured) -> None:
    rows = measured("attention", "--device", "cpu", "--tokens", "128")["rows"]
    assert [row["kernel"] for row in rows] == ["sdpa"] * 4
    for row in rows:
        assert max(row["error"].values()) < 1e-5
        assert row["forward_ms"] > 0


def test_slices_are_measured_with_every_kernel_there_is(measured: Measured) -> None:
    result = measured("slices", "--tiny", "--tokens", "320", "--slices", "4")
    ran = {row["kernel"] for row in result["attention"] if "error" in row}
    assert ran >= {"torch_cpu", "plain"}
    assert {row["kernel"] for row in result["attention"] if "unavailable" in row} == {"flash_attn", "torch_flash"}
    assert all(max(row["error"].values()) < 1e-5 for row in result["attention"] if "error" in row)
    (run,) = result["sequences"]
    assert [row["variant"] for row in run["rows"]] == ["whole", "recomputed", "sliced", "sliced, replayed"]
    assert all(row["grad_rel_err"] < 1e-5 and row["tokens_per_s"] > 0 for row in run["rows"])


def test_slices_start_nothing_when_time_is_up(measured: Measured) -> None:
    (run,) = measured("slices", "--tiny", "--tokens", "320", "--limit", "0")["sequences"]
    assert {row["failed"] for row in run["rows"]} == {"no time left"}


def test_the_places_of_a_ring_are_measured_with_every_engine(measured: Measured) -> None:
    result = measured("ring", "--tiny", "--tokens", "128", "--places", "3")
    shared = {(row["engine"], row["places"]) for row in result["errors"]}
    assert {engine for engine, _ in shared} == {"ring", "all_gather", "all_to_all", "hybrid"}
    limits = {"float64": 1e-12, "float32": 1e-5}
    assert {row["dtype"] for row in result["errors"]} == set(limits)
    assert all(max(row["error"].values()) < limits[row["dtype"]] for row in result["errors"])
    (ring,) = result["rings"]
    calls = {(b["kind"], b["queries"], b["keys"], b["causal"]): b["calls"] for b in ring["blocks"]}
    assert sum(count for (kind, _, _, causal), count in calls.items() if kind == "F" and causal) == 3
    assert sum(count for (kind, _, _, causal), count in calls.items() if kind == "B" and not causal) == 6
    pairs = sum(n * (q * k - causal * q * (q - 1) / 2) for (kind, q, k, causal), n in calls.items() if kind == "F")
    assert pairs == 128 * 129 / 2
    assert set(ring["all_over_whole"]) == set(ring["busiest_over_mean"]) == {"F", "B"}


def test_offload_is_measured_share_by_share(measured: Measured) -> None:
    result = measured("offload", "--tiny", "--tokens", "128", "--shares", "0.5,1")
    first, *rows, last = result["rows"]
    assert (first["out_bytes"], last["out_bytes"], last["error"]) == (0, 0, 0)
    assert {row["share"] for row in rows} >= {0.5, 1.0}
    for row in rows:
        assert row["error"] == 0
        assert row["back_bytes"] == row["out_bytes"] <= row["host_bytes"]
        assert abs(row["out_bytes"] - row["share"] * row["seen_bytes"]) <= 4 * 2 * 128 * 128 / 2
        assert row["peak_bytes"] < first["peak_bytes"] + row["host_bytes"]
    assert 0 <= result["best_share"] <= 1
    assert result["layer_bytes"] == rows[0]["seen_bytes"] / 3


@full
def test_chunks_are_measured_with_no_some_and_all_layers_recomputed(measured: Measured) -> None:
    rows = measured("chunks", "--tiny", "--tokens", "512")["rows"]
    assert [row["recomputed"] for row in rows] == ["0 of 2", "1 of 2", "2 of 2", "graded"]
    assert all(row["grad_norm_rel_diff"] < 1e-6 and row["measured_s"] > 0 for row in rows)
    assert max(abs(row["bytes_error"]) for row in rows) < 0.15
    for name in ("predicted_bytes", "measured_bytes"):
        none, some, all_, graded = (row[name] for row in rows)
        assert none > max(some, graded) >= min(some, graded) > all_
    none, some, all_, graded = (row["predicted_s"] for row in rows)
    assert none <= min(some, graded) <= max(some, graded) <= all_, "by costs of a machine however busy"


def test_experts_are_multiplied_with_copies(measured: Measured) -> None:
    result = measured("experts", "--tiny")
    assert all(max(row["each_error"], row["grouped_error"]) < 1e-6 for row in result["products"])
    assert "fetch" not in result


@pytest.mark.parametrize(("dtype", "rounds"), [("fp32", 1e-6), ("bf16", 1e-2)])
def test_adapters_are_as_exact_as_a_textbook_has_them(measured: Measured, dtype: str, rounds: float) -> None:
    rows = measured("adapters", "--tiny", "--dtype", dtype)["rows"]
    assert [row["tenants"] for row in rows] == [1, 8, 64]
    for row in rows:
        assert row["ms"].keys() == {"bare", "evenload", "loop", *(["grouped"] if dtype == "bf16" else [])}
        assert min(row["ms"].values()) > 0
        assert 0 < row["error"]["loop"] < rounds
        assert 0 < row["error"]["evenload"] < 1.5 * row["error"]["loop"]


def test_decode_kernels_are_measured_against_float64(measured: Measured) -> None:
    result = measured("decode", "--tiny")
    assert [(row["kernel"], row["rows"]) for row in result["rows"]] == [("torch", "even"), ("torch", "heavy tail")]
    assert all(row["error"] < 1e-5 and row["ms"] > 0 for row in result["rows"])
    assert [name for name, rate in result["tokens_per_s"].items() if rate > 0] == ["evenload"]


@pytest.mark.parametrize("name", ["slices", "chunks", "ring", "offload", "experts", "adapters", "decode"])
def test_what_needs_a_card_says_so(name: str, scripted: Callable[..., Any], tmp_path: Path) -> None:
    done = scripted("megatron", tmp_path, GPU / f"{name}.py")
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
    assert done.stdout == ""
