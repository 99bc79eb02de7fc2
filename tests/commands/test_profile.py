"""`evenload profile`: which shapes it measures, what it fits, what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evenload.commands import profile
from evenload.commands.profile import Sample, Shape, fit_samples, measure, shapes, write_costs
from evenload.core import costs as cost_models
from evenload.core.costs import Costs, MemoryCost, PassCost
from evenload.core.errors import EvenloadError
from evenload.runtime.held import free_bytes, held_for_backward, live_bytes

FORWARD = PassCost(launch_s=2e-3, token_s=3e-6, pair_s=4e-9)
BACKWARD = PassCost(launch_s=3e-3, token_s=6e-6, pair_s=1e-8)
CPU = torch.device("cpu")


def seconds(cost: PassCost, shape: Shape) -> float:
    return cost.launch_s + shape.num * float(cost.seconds(shape.length))


@pytest.mark.parametrize(("max_length", "max_tokens"), [(8192, 16384), (64, 64), (100, 1000), (32768, 32768), (2, 2)])
def test_shapes_fit_the_cap_and_tell_lengths_from_tokens(max_length: int, max_tokens: int) -> None:
    grid = shapes(max_length, max_tokens)
    assert len(set(grid)) == len(grid)
    assert Shape(1, max_length) in grid
    assert all(shape.tokens <= max_tokens and shape.length <= max_length for shape in grid)
    assert [s.tokens for s in grid] == sorted(s.tokens for s in grid)
    if max_length > 256:
        by_tokens = [s.tokens for s in grid]
        assert any(by_tokens.count(n) > 1 for n in by_tokens)


def test_a_shape_is_a_lawful_plan_of_one_micro_batch() -> None:
    shape = Shape(3, 5)
    assert shape.plan.num_tokens == shape.tokens == 15
    assert shape.pairs == 3 * 12.5
    costs = Costs(source="test", forward=FORWARD, backward=BACKWARD)
    assert costs.micro_batch_s(shape.micro_batch) == pytest.approx([seconds(FORWARD, shape), seconds(BACKWARD, shape)])


def test_the_fit_finds_the_planted_coefficients() -> None:
    samples = [Sample(s.num, s.length, seconds(FORWARD, s), seconds(BACKWARD, s), 1) for s in shapes(4096, 16384)]
    forward, backward, errors = fit_samples(samples)
    assert max(errors.values()) < 1e-9
    for found, planted in ((forward, FORWARD), (backward, BACKWARD)):
        assert found.model_dump() == pytest.approx(planted.model_dump(), rel=1e-6)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(EvenloadError, match="too few shapes"):
        fit_samples([Sample(1, 64, 1.0, 2.0, 1)] * 3)


@dataclass
class Machine:
    """A host that takes planted times, on a clock of its own; every second run is disturbed."""

    now: float = 0.0
    runs: int = 0

    def train_step(self, plan: Any, tokens_of: Any, *, lr: float) -> Any:
        assert lr == 0.0
        assert len(tokens_of(0)) >= plan.sequences[0].length
        shape = Shape(len(plan.sequences), plan.sequences[0].length)
        self.runs += 1
        noise = 1.0 + 0.5 * (self.runs % 2)
        forward, backward = seconds(FORWARD, shape) * noise, seconds(BACKWARD, shape) * noise
        self.now += forward + backward
        return SimpleNamespace(forward_s=forward, busy_s=forward + backward)


def job_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    costs = Costs(source="test", forward=FORWARD, backward=BACKWARD)
    recipe = SimpleNamespace(model=SimpleNamespace(vocab_size=128), data=SimpleNamespace(max_length=4096))
    return SimpleNamespace(
        host=machine,
        recipe=recipe,
        leads=False,
        watchdog=SimpleNamespace(at=lambda where: None),
        chain=SimpleNamespace(situation=SimpleNamespace(costs=costs)),
    )


def test_the_least_of_some_runs_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = measure(job_on(Machine(), monkeypatch), shapes(4096, 4096))
    assert [(s.num, s.length) for s in samples] == shapes(4096, 4096)
    for sample in samples:
        assert sample.runs >= 2
        assert sample.forward_s == pytest.approx(seconds(FORWARD, Shape(sample.num, sample.length)))
        assert sample.backward_s == pytest.approx(seconds(BACKWARD, Shape(sample.num, sample.length)))


def test_shapes_that_would_overrun_the_budget_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(profile, "BUDGET_S", 1.0)
    samples = measure(job_on(machine, monkeypatch), shapes(65536, 65536))
    assert 4 < len(samples) < len(shapes(65536, 65536))
    assert machine.now < 1.0 + 1.5 * profile.REPEATS * max(s.forward_s + s.backward_s for s in samples)


def test_written_costs_are_read_back(tmp_path: Path) -> None:
    costs = Costs(
        source="a machine; `evenload profile`",
        forward=FORWARD,
        backward=BACKWARD,
        memory=MemoryCost(fixed_bytes=1e9, activation_bytes_per_token=123456.0, kv_bytes_per_token=8192.0),
        num_layers=4,
        fit_error=0.0123,
    )
    out = tmp_path / "costs.yaml"
    out.write_text("older")
    write_costs(costs, out)
    assert cost_models.load(str(out), tmp_path) == costs
    assert [p.name for p in tmp_path.iterdir()] == ["costs.yaml"]


def test_costs_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "costs.yaml").mkdir()
    with pytest.raises(EvenloadError, match="cannot be written"):
        write_costs(Costs(source="x", forward=FORWARD, backward=BACKWARD), tmp_path / "costs.yaml")
    assert [p.name for p in tmp_path.iterdir()] == ["costs.yaml"]


@pytest.mark.parametrize(("out", "what"), [("costs.json", "YAML file"), ("nowhere/costs.yaml", "cannot be written")])
def test_a_wrong_out_is_refused_before_anything_is_measured(tmp_path: Path, out: str, what: str) -> None:
    with pytest.raises(EvenloadError, match=what):
        profile.profile(None, tmp_path / out)  # type: ignore[arg-type]


def test_live_bytes_counts_a_storage_once() -> None:
    before = live_bytes(CPU)
    kept = torch.zeros(1000, dtype=torch.float64)
    views = [kept[:10], kept.view(10, 100)]
    assert live_bytes(CPU) - before == 8000
    del kept, views
    assert live_bytes(CPU) == before


def test_held_for_backward_grows_with_the_tokens_alone() -> None:
    weight = torch.randn(50, 50, requires_grad=True)

    def held(tokens: int) -> int:
        x = torch.randn(tokens, 50, requires_grad=True)
        with held_for_backward(CPU) as one:
            (x @ weight).exp().sum().backward()
        assert x.grad is not None
        return one.num_bytes

    # exp keeps its output and the product its inputs: [tokens, 50] twice, and the weight.
    assert held(40) == 4 * (2 * 40 * 50 + 2500)
    assert held(40) - held(10) == 4 * 2 * 30 * 50


def test_free_bytes_is_a_plausible_number() -> None:
    assert 1 << 20 < free_bytes(CPU) < 1 << 50


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["megatron", "deepspeed"])
def test_profile_measures_a_real_trainer(tmp_path: Path, trainer: str) -> None:
    (tmp_path / "recipe.yaml").write_text(
        f"trainer: {trainer}\n"
        "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, num_query_groups: 2}\n"
        "data: {source: samples.jsonl, max_length: 256}\ntrain: {global_batch_size: 4}\n"
        "plugins: {packing: {enabled: true, max_tokens: 1024}}\n"
    )
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(1, 40)))
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "evenload", "profile", "recipe.yaml", "--out", "costs.yaml", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        env=clean,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) >= {"host", "passes", "fit_error", "samples", "out", "memory"}
    assert {(s["num"], s["length"]) for s in result["samples"]} <= set(shapes(256, 1024))
    costs = cost_models.load(str(tmp_path / "costs.yaml"), tmp_path)
    assert costs.forward.token_s > 0
    assert costs.backward.token_s > 0
    assert "evenload profile recipe.yaml" in costs.source
    parameters = result["host"].get("parameters") or result["host"]["parameters_on_rank"]
    # Weights, gradients and two Adam states in float32 at least.
    assert costs.memory.fixed_bytes >= 16 * parameters
    # K and V: 2 x 2 heads of 16 in float32, 2 layers.
    assert costs.memory.kv_bytes_per_token == 2 * 2 * 16 * 4 * 2
    # At least the inputs of the seven projections of a layer: 4 x hidden and 2 x ffn values.
    assert costs.memory.activation_bytes_per_token > 2 * 4 * 4 * 64
    done = subprocess.run(
        [sys.executable, "-m", "evenload", "profile", "--out", "costs.txt"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env=clean,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "ends in .yaml" in done.stderr
