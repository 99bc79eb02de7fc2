"""Scripts of tenants at a tiny size: every variant trains the same to rounding, and tables say what was compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evenload.benchmarks.lora import at_once, lora_ranks, sweep, together
from harness.cases import full

RECIPES = Path(__file__).parents[3] / "recipes"


def test_a_tenant_has_the_same_samples_alone_and_in_company() -> None:
    batch = lora_ranks.batch_of(3, [1, 2, 5], 4, 512)
    assert (len(batch.lengths), batch.tenants.tolist()) == (12, [1] * 4 + [2] * 4 + [5] * 4)
    assert batch.lengths.max() <= 512
    alone = lora_ranks.batch_of(3, [2], 4, 512)
    own = batch.of(2).renumbered(1000)
    assert own.tenants.tolist() == [1002] * 4
    assert own.lengths.tolist() == alone.lengths.tolist()
    assert all(np.array_equal(own.tokens(i), alone.tokens(i)) for i in range(4))
    assert all(len(own.tokens(i)) == own.lengths[i] for i in range(4))
    assert not np.array_equal(batch.lengths, lora_ranks.batch_of(4, [1, 2, 5], 4, 512).lengths)


def test_tenants_together_lose_what_each_loses_alone(ran: Any) -> None:
    words = ("--layout", "pp2", "--samples", "2", "--tenants", "3", "--steps", "2", "--longest", "64")
    (case,) = json.loads(ran("lora/together.py", *words, ranks=2).stdout)["cases"]
    assert case["apart"] < 1e-5
    assert min(case["tokens_per_s"].values()) > 0
    assert [row["step"] for row in case["rows"]] == [1, 2]
    assert case["predicted"] >= 1.0, "one step of all costs no more than a step of each"
    for row in case["rows"]:
        assert len(row["losses"]["together"]) == 3
        assert all(4 < loss < 7 for loss in row["losses"]["together"])


@full
@pytest.mark.slow
def test_a_job_each_takes_a_base_each(tmp_path: Path) -> None:
    """By torchrun, three times."""
    words = ("--samples", "2", "--tenants", "2", "--steps", "2", "--repeats", "1", "--longest", "64", "--json")
    command = [sys.executable, at_once.__file__, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    one, each = result["variants"]["one job"], result["variants"]["a job each"]
    assert result["apart"] < 1e-5
    assert 1.5 < each["own_bytes"] / one["own_bytes"] < 2.5
    assert min(one["start_s"], each["start_s"]) > 1
    assert min(one["tokens_per_s"], each["tokens_per_s"]) > 0


def test_adapters_are_timed_over_the_bare_base(benchmark: Any) -> None:
    result = benchmark("lora/bare.py", "--tenants", "1,2", "--samples", "4", "--steps", "6", "--longest", "64")
    assert list(result["variants"]) == ["bare", "1", "2"]
    for name, own in result["variants"].items():
        assert own["seconds"]["over"]["steps"] == 6
        assert (own["passes"]["over"]["of_totals"] > 1.0) is (name != "bare")


@full
def test_a_sweep_trains_less_than_all_of_its_trials(
    forged: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    samples = [json.dumps({"prompt": "a" * k, "completion": " b" * k}) for k in range(3, 23)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(samples) + "\n")
    (tmp_path / "swept.yaml").write_text(f"""
        data: {{source: {tmp_path}/pairs.jsonl, max_length: 64}}
        train: {{steps: 4, batch_size: 2}}
        evaluate: {{source: {tmp_path}/pairs.jsonl, every: 1}}
        sweep: {{train.lr: [1.0e-9, 1.0e-2], halve_every: 2}}
    """)

    def run(folder: Path) -> Any:
        words = (f"plugins.lora.tenants={folder / 'tenants'}", f"plugins.lora.out={folder / 'out'}", "--json")
        done = forged(RECIPES, "train", "lora.yaml", "parallel.dp=1", *words)
        assert done.returncode == 0, done.stderr[-3000:]
        return {**json.loads(done.stdout), "all_s": 1.0}

    monkeypatch.setattr(sweep, "run", run)
    (one,) = sweep.benchmark(tmp_path / "swept.yaml", ["adapter.r=4"], repeats=1)["runs"]
    assert one["halving"]["winner"] == one["full"]["winner"] == "swept.lr=0.01"
    assert one["halving"]["loss"] == pytest.approx(one["full"]["loss"], rel=1e-5)
    assert (one["halving"]["steps"], one["full"]["steps"]) == (2 + 4, 4 + 4)
    assert set(one["full"]["best"]) == {"swept.lr=1e-09", "swept.lr=0.01"}


def test_keys_of_a_swept_file_are_changed_one_by_one() -> None:
    fields = {"train": {"steps": 64}, "sweep": {"train.lr": [1, 2], "halve_every": 16}}
    new = sweep.changed(fields, ["train.steps=8", "sweep.halve_every=2", "sweep.train.lr=[3, 4]", "data.max_length=9"])
    assert new == {"train": {"steps": 8}, "sweep": {"train.lr": [3, 4], "halve_every": 2}, "data": {"max_length": 9}}
    assert fields["train"] == {"steps": 64}


def test_tables_say_what_is_faster_and_by_how_much(shown: Any) -> None:
    over = {"steps": 20, "of_totals": 1.3, "median": 1.31, "interval": [1.2, 1.4]}
    rates = {"together": 20000.0, "one after another": 15000.0}
    case = {"samples": 4, "tenants": 4, "tokens_per_s": rates, "over": over, "predicted": 1.38, "apart": 1e-8}
    text = shown(together.table({"layout": "dp2", "cases": [case], "host": {"device": "cpu"}}))
    assert all(word in text for word in ("4 x 4", "20,000", "15,000", "1.30x", "1.20 .. 1.40", "1.38x", "1e-08"))
    one, each = ({"start_s": 9.0, "tokens_per_s": 12000.0 / n, "own_bytes": n * 2.0**30} for n in (1, 3))
    text = shown(at_once.table({"samples": 8, "apart": 2e-9, "variants": {"one job": one, "a job each": each}}))
    assert all(word in text for word in ("12,000", "1 GiB", "4,000", "3 GiB"))
    winners = {"winner": "a.r=4", "loss": 6.5, "steps": 30, "train_s": 2.0, "all_s": 10.0}
    runs = [{"halving": winners, "full": {**winners, "steps": 64, "train_s": 5.0, "all_s": 14.0}}]
    text = " ".join(shown(sweep.table({"file": "a.yaml", "runs": runs})).split())
    assert "a speedup of 2.50x, start and evaluations with it 1.40x" in text
