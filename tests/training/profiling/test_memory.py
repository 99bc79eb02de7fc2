"""The memory part of a profile: coefficients that were planted are found; real trainers hold what is predicted."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from evenload.core.costs.memory import peak_activation_bytes
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.training.profiling.memory import COUNTS, Readings, fit_memory_cost, two_alive
from harness.cases import full, only_full

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "memory" / "memory.py"
LENGTH = 100
PLANTED = MemoryCost(
    pass_bytes=5000.0,
    activation_bytes_per_token=800.0,
    cut_saves_bytes_per_token=160.0,
    head_bytes_per_token=120.0,
    head_working_bytes_per_token=70.0,
    working_bytes_per_token=90.0,
    kv_bytes_per_token=64.0,
)


def readings(tokens, *, cut, constant=0.0):
    """What the two micro-batches of a step hold where the model is right."""
    layers = PLANTED.activation_bytes_per_token - cut * PLANTED.cut_saves_bytes_per_token
    own = tokens * (layers + PLANTED.head_bytes_per_token) + constant
    stored = cut * 2 * tokens * PLANTED.kv_bytes_per_token
    head_peak = 2 * own + stored + tokens * PLANTED.head_working_bytes_per_token + PLANTED.pass_bytes
    in_layers = PLANTED.working_bytes_per_token - PLANTED.head_bytes_per_token
    layers_peak = 2 * own + stored + tokens * in_layers + PLANTED.pass_bytes
    return Readings(tokens, tokens * layers, own + stored, head_peak, layers_peak, max(head_peak, layers_peak))


def fitted(constant=0.0):
    rows = [[readings(n * LENGTH, cut=cut, constant=constant) for n in COUNTS] for cut in (False, True)]
    return fit_memory_cost(rows[0], rows[1], PLANTED.kv_bytes_per_token)


@pytest.mark.parametrize("constant", [0.0, 12345.0])
def test_planted_coefficients_are_found(constant):
    """Also where every micro-batch holds something that does not depend on its tokens."""
    assert fitted(constant=constant) == PLANTED


def test_no_coefficient_is_negative():
    """A loss that frees more than it takes, and cut tokens that keep more than others."""
    rows = [readings(n * LENGTH, cut=False)._replace(head_peak=0.0, layers_peak=0.0) for n in COUNTS]
    cut = [readings(n * LENGTH, cut=True)._replace(kept=1e6 * n) for n in COUNTS]
    found = fit_memory_cost(rows, cut, 64.0)
    assert found.head_working_bytes_per_token == found.working_bytes_per_token == 0.0
    assert found.cut_saves_bytes_per_token == found.pass_bytes == 0.0


def test_the_model_predicts_what_its_coefficients_were_fitted_to():
    memory = fitted()
    limits = Limits(1, 10_000, layers_per_stage=2, memory=memory)
    for count in COUNTS:
        for cut in (False, True):
            plan = replace(two_alive(count, LENGTH, cut=cut), limits=limits)
            assert peak_activation_bytes(plan, 0, 0)[0] == readings(count * LENGTH, cut=cut).peak


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("cut", [False, True])
def test_every_rank_holds_two_micro_batches_of_the_same_size(cut, num_ranks):
    plan = two_alive(3, LENGTH, cut=cut, num_ranks=num_ranks)
    for rank in range(num_ranks):
        mine = [plan.micro_batches[i] for i in plan.of_rank(rank)]
        assert [m.num_tokens for m in mine] == [3 * LENGTH] * 2
        kinds = [op.kind for op in plan.order[0] if op.micro_batch in plan.of_rank(rank)]
        assert kinds == ["F", "F", "B", "B"]
    assert bool(plan.cut) == cut


def refuse_other_memory(rows, count):
    assert len(rows) == count
    for row in rows:
        for name in ("activations", "total"):
            assert row[name] == pytest.approx(row[f"{name}_measured"], rel=0.08), (row["case"], row["plan"], name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "cases"),
    [
        ("megatron", ["megatron", "megatron, recompute"]),
        ("deepspeed", ["zero 0"]),
        only_full("deepspeed", ["zero 0", "zero 0, recompute"]),
    ],
)
def test_real_trainers_hold_what_is_predicted(trainer, cases, tmp_path, scripted):
    """Profile, then plans that were not measured: uneven packs, slices, replays; kept activations and recomputed."""
    script = BENCHMARK.with_name("memory_plans.py")
    names = [one.name for one in runpy.run_path(str(script))["CASES"]]
    costs = tmp_path / "costs.json"
    costs.write_text("{}")
    for case in cases:
        done = scripted(trainer, tmp_path, script, names.index(case), costs, tmp_path / "rows.json")
        assert done.returncode == 0, done.stderr[-3000:]
        refuse_other_memory(json.loads((tmp_path / "rows.0").read_text()), 3)


@full
def test_the_benchmark_starts_its_ranks_itself(tmp_path, scripted):
    out = tmp_path / "rows.json"
    done = scripted("megatron", tmp_path, BENCHMARK, "--plans", "--only", "megatron, recompute", "--out", out)
    assert done.returncode == 0, done.stderr[-3000:]
    refuse_other_memory(json.loads(out.read_text())["rows"], 6)
