"""`evenload profile`: which shapes it measures, what it fits, what it writes."""

import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from evenload.api import load_plugins
from evenload.core.costs import costs as cost_models
from evenload.core.costs.context import PlanningContext, Traffic
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.errors import EvenloadError
from evenload.core.machine import cluster as clusters
from evenload.core.machine.layout import Layout
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import RECIPES
from evenload.core.recipe.recipe import load
from evenload.core.simulate.step import simulate
from evenload.runtime.measure.memory import live_bytes
from evenload.training.profiling.cases import Case, cases
from evenload.training.profiling.degrees import sharded_otherwise
from evenload.training.verbs import profile
from evenload.training.verbs.profile import MeasuredCase, fit_samples, measure
from harness.cases import only_full
from harness.commands import command

load_plugins()
QUICK = """
from evenload.training.verbs import profile
profile.REPEATS = profile.FEWEST_RUNS = 1
profile.LINKS_S = 0.5
"""
"""Nothing here depends on how well seconds are measured."""
FORWARD = PassCost(launch_s=2e-3, token_s=3e-6, pair_s=4e-9)
BACKWARD = PassCost(launch_s=3e-3, token_s=6e-6, pair_s=1e-8)
LAUNCH_S, TOKEN_S, CONSTANT_S = 1e-3, 1e-7, 5e-3
"""The rest of a step: a micro-batch's, a token's and its own."""
PLANTED = Costs(source="test", forward=FORWARD, backward=BACKWARD)
CPU = torch.device("cpu")


def rest_of(case):
    return CONSTANT_S + LAUNCH_S * case.work.launches + TOKEN_S * case.work.tokens


def context(num_ranks=2, **traffic):
    layout = Layout(dp=num_ranks)
    cluster = clusters.load("local", RECIPES / "clusters")
    link = clusters.Link(latency_s=0.0, bytes_per_s=2e9)
    return PlanningContext(PLANTED, layout, cluster.model_copy(update={"intra": link}), Traffic(**traffic))


@pytest.mark.parametrize(("max_length", "max_tokens"), [(8192, 16384), (64, 64), (100, 1000), (32768, 8192), (2, 2)])
def test_cases_fit_the_cap_and_tell_lengths_from_tokens(max_length, max_tokens):
    found = cases(max_length, max_tokens)
    assert len(set(found)) == len(found)
    assert any(c.length == max_length for c in found)
    assert all(case.slots <= max_tokens and case.length <= max_length for case in found)
    assert [c.tokens for c in found] == sorted(c.tokens for c in found)
    if max_length > 256:
        whole = [c.tokens for c in found if c.cuts == c.count == 1]
        assert any(whole.count(n) > 1 for n in whole)
        assert {c.cuts for c in found} == {1, 2, 4, 8}
        assert {c.count for c in found} == {1, 4}


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("case", [Case(3, 5), Case(2, 100, count=3), Case(2, 101, cuts=4), Case(1, 64, 2, 2)], ids=str)
def test_a_case_is_a_lawful_plan_with_the_same_work_on_every_rank(case, num_ranks):
    plan = case.plan(num_ranks)
    assert plan.num_tokens == num_ranks * case.tokens
    for rank in range(num_ranks):
        mine = [plan.micro_batches[i] for i in plan.of_rank(rank)]
        assert cost_models.work_of(mine) == pytest.approx(case.work)
        assert len(mine) == case.count * case.cuts == case.work.launches
        assert max(m.num_padded_tokens for m in mine) == case.slots
    assert case.work.pairs == pytest.approx(case.count * case.num * case.length**2 / 2)
    assert bool(plan.order) == (case.cuts > 1) == bool(plan.cut)


def samples_of(planted, **changed):
    def sample(case):
        forward_s, backward_s, rest_s = planted.forward.of(case.work), planted.backward.of(case.work), rest_of(case)
        shape = case.num, case.length, case.count, case.cuts
        seconds = {"forward_s": forward_s, "backward_s": backward_s, "rest_s": rest_s}
        return MeasuredCase(*shape, **seconds, step_s=sum(seconds.values()), runs=1)

    return [replace(sample(case), **changed) for case in cases(4096, 16384)]


@pytest.mark.parametrize("sharding", ["none", "optimizer"])
def test_the_fit_finds_the_planted_coefficients(sharding):
    at = context(2, sharding=sharding)
    found = fit_samples(samples_of(PLANTED), at, waiting_counts=False)
    assert max(found.errors.values()) < 1e-6
    half = PassCost(launch_s=LAUNCH_S / 2, token_s=TOKEN_S / 2)
    for passes, planted in ((found.forward, FORWARD), (found.backward, BACKWARD)):
        assert passes.model_dump() == pytest.approx(planted.plus(half).model_dump(), rel=1e-6)
    # Ranks that share the optimizer take the time of a share.
    assert found.update_s == pytest.approx(CONSTANT_S * (2 if sharding == "optimizer" else 1))


def test_the_fit_tells_experts_apart():
    samples = [
        replace(
            s,
            forward_s=s.forward_s + 1e-3 * s.work.launches + 5e-6 * s.work.tokens,
            backward_s=s.backward_s + 9e-6 * s.work.tokens,
            experts_forward_s=1e-3 * s.work.launches + 5e-6 * s.work.tokens,
            experts_backward_s=9e-6 * s.work.tokens,
        )
        for s in samples_of(PLANTED)
    ]
    found = fit_samples(samples, context(2), waiting_counts=False)
    dense = fit_samples(samples_of(PLANTED), context(2), waiting_counts=False)
    slower = sum(s.step_s for s in samples) / sum(s.forward_s + s.backward_s + s.rest_s for s in samples)
    expected = {"launch_s": dense.forward.launch_s + 1e-3, "expert_s": 5e-6}
    forward = {name: value * slower for name, value in (dense.forward.model_dump() | expected).items()}
    assert found.forward.model_dump() == pytest.approx(forward, rel=1e-6)
    backward = dense.backward.model_dump() | {"expert_s": 9e-6}
    assert found.backward.model_dump() == pytest.approx({k: v * slower for k, v in backward.items()}, rel=1e-6)
    assert found.errors["forward"] < 1e-6


def test_a_tensor_parallel_rank_gets_back_what_it_took():
    at = replace(context(1), layout=Layout(tp=2))
    found = fit_samples(samples_of(PLANTED), at, waiting_counts=False)
    whole = Costs(source="", forward=found.forward, backward=found.backward, update_s=found.update_s)
    rank = whole.of_stage(at.layout)
    half = PassCost(launch_s=LAUNCH_S / 2, token_s=TOKEN_S / 2)
    assert rank.forward.model_dump() == pytest.approx(FORWARD.plus(half).model_dump(), rel=1e-6)
    assert rank.backward.model_dump() == pytest.approx(BACKWARD.plus(half).model_dump(), rel=1e-6)
    assert rank.update_s == pytest.approx(CONSTANT_S)


def test_what_the_simulator_adds_to_a_step_is_not_counted_twice():
    """Where waiting counts, the rest holds the gradient sum, which the links predict."""
    at = context(2, gradient_bytes=1e7)
    costs = replace(at, costs=PLANTED)
    sum_s = {float(simulate(case.plan(2), costs, record=False).exposed_s.max()) for case in cases(4096, 16384)[:3]}
    assert len(sum_s) == 1
    (gradient_sum_s,) = sum_s
    assert gradient_sum_s > 1e-3
    samples = [
        replace(s, rest_s=s.rest_s + gradient_sum_s, step_s=s.step_s + gradient_sum_s) for s in samples_of(PLANTED)
    ]
    found = fit_samples(samples, at, waiting_counts=True)
    assert found.update_s == pytest.approx(CONSTANT_S)
    assert found.errors["step"] < 1e-6
    # Counted twice, the same samples give a longer update and wrong steps.
    assert fit_samples(samples, at, waiting_counts=False).update_s > CONSTANT_S + 0.9 * gradient_sum_s


def test_a_formula_that_is_not_the_machine_s_shows_in_the_error():
    """Attention that costs every slice its whole sequence again: not linear in launches, tokens and pairs."""
    samples = [replace(s, backward_s=s.backward_s * s.cuts) for s in samples_of(PLANTED)]
    errors = fit_samples(samples, context(), waiting_counts=False).errors
    assert errors["forward"] < 1e-6
    assert errors["backward"] > 0.1
    assert errors["step"] > 0.05


def test_what_the_wall_adds_to_cpu_seconds_is_in_every_coefficient():
    samples = [replace(s, step_s=1.2 * s.step_s) for s in samples_of(PLANTED)]
    slow, fast = (fit_samples(found, context(), waiting_counts=False) for found in (samples, samples_of(PLANTED)))
    assert slow.errors == pytest.approx(fast.errors, abs=1e-6)
    assert slow.update_s == pytest.approx(1.2 * fast.update_s)
    for name in ("forward", "backward"):
        told, plain = (getattr(found, name).model_dump() for found in (slow, fast))
        assert told == pytest.approx({key: 1.2 * value for key, value in plain.items()})


def test_too_few_samples_are_refused():
    with pytest.raises(EvenloadError, match="too few shapes"):
        fit_samples(samples_of(PLANTED)[:3], context(), waiting_counts=False)


@dataclass
class Machine:
    """A host that takes planted times, on a clock of its own; of five runs the first is disturbed."""

    now: float = 0.0
    runs: int = 0
    layout: Layout = field(default_factory=Layout)
    model: torch.nn.Module = field(default_factory=torch.nn.Identity)
    trained: Any = None

    def train_step(self, plan, tokens_of, *, lr, mark):
        assert lr == 0.0
        assert len(tokens_of(0)) >= int(plan.lengths[0])
        work = cost_models.work_of(plan.micro_batches)
        self.runs += 1
        noise = 1.0 + 0.5 * (self.runs % profile.REPEATS == 1)
        forward, backward = FORWARD.of(work) * noise, BACKWARD.of(work) * noise
        self.now += forward + backward + CONSTANT_S
        return SimpleNamespace(forward_s=forward, busy_s=forward + backward)


def job_on(machine, monkeypatch):
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    monkeypatch.setattr(profile, "cpu_clock", lambda: lambda: machine.now)
    data = SimpleNamespace(max_length=65536)
    recipe = SimpleNamespace(model=SimpleNamespace(vocab_size=128), data=data, adapts=False)
    return SimpleNamespace(
        host=machine,
        recipe=recipe,
        is_rank0=False,
        world=SimpleNamespace(size=1, device=CPU),
        gather=lambda *values: np.array([values]),
        watchdog=SimpleNamespace(at=lambda where: None),
        chain=SimpleNamespace(context=SimpleNamespace(costs=PLANTED)),
    )


def test_the_least_of_some_runs_is_kept(monkeypatch):
    monkeypatch.setattr(profile, "CASE_S", 1e9)
    samples = measure(job_on(Machine(), monkeypatch), cases(4096, 4096))
    assert [Case(s.num, s.length, s.count, s.cuts) for s in samples] == cases(4096, 4096)
    for sample in samples:
        assert sample.runs == profile.REPEATS
        assert sample.forward_s == pytest.approx(FORWARD.of(sample.work))
        assert sample.backward_s == pytest.approx(BACKWARD.of(sample.work))
        assert sample.rest_s == pytest.approx(CONSTANT_S)
        assert sample.step_s == pytest.approx(sample.forward_s + sample.backward_s + CONSTANT_S)


@pytest.mark.parametrize(("before", "after", "is_busy"), [(0.5, 1.0, False), (9.0, 1.0, True), (0.5, 9.0, True)])
def test_the_higher_of_two_loads_and_the_spread_of_runs_are_what_ran_beside(monkeypatch, before, after, is_busy):
    monkeypatch.setattr(profile, "CASE_S", 1e9)
    monkeypatch.setattr(profile, "load_average", lambda: after)
    monkeypatch.setattr(profile.os, "cpu_count", lambda: 2)
    job = job_on(Machine(), monkeypatch)
    samples = measure(job, cases(256, 256))
    # One run of five is disturbed, so the median is the least.
    assert [sample.spread for sample in samples] == pytest.approx([1.0] * len(samples))
    assert profile._beside(job, samples, before, per_node=1).busy == is_busy
    slower = [replace(sample, spread=1.5) for sample in samples]
    assert profile._beside(job, slower, before, per_node=1).busy


def test_cases_that_would_overrun_the_budget_are_left_out(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(profile, "BUDGET_S", 4.0)
    samples = measure(job_on(machine, monkeypatch), cases(65536, 65536))
    assert 4 < len(samples) < len(cases(65536, 65536))
    assert machine.now < 4.0 + 1.5 * profile.REPEATS * max(s.forward_s + s.backward_s for s in samples)


@pytest.mark.parametrize(("out", "what"), [("costs.json", "YAML file"), ("nowhere/costs.yaml", "cannot be written")])
def test_a_wrong_out_is_refused_before_anything_is_measured(tmp_path, out, what):
    with pytest.raises(EvenloadError, match=what):
        profile.profile(None, tmp_path / out)


@pytest.mark.parametrize("word", ["deepspeed.zero_stage=2", "train.steps=3", "model.num_layers=3", "trainer=megatron"])
def test_what_one_file_does_not_tell_apart_is_refused_before_anything_is_measured(word):
    own = ["trainer=deepspeed", "deepspeed.zero_stage=1"]
    recipe, changed = load("quickstart", own), load("quickstart", [*own, word])
    with pytest.raises(EvenloadError, match="tells recipes apart by what their ranks divide"):
        sharded_otherwise(recipe, {word: changed})
    other = load("quickstart", [*own, "deepspeed.zero_stage=0"])
    assert sharded_otherwise(recipe, {"deepspeed.zero_stage=0": other}, [1]) == {"none": other}
    with pytest.raises(EvenloadError, match="several degrees of tensor parallelism or several shardings"):
        sharded_otherwise(recipe, {"deepspeed.zero_stage=0": other}, [1, 2])


def test_live_bytes_counts_a_storage_once():
    before = live_bytes(CPU)
    kept = torch.zeros(1000, dtype=torch.float64)
    views = [kept[:10], kept.view(10, 100)]
    assert live_bytes(CPU) - before == 8000
    del kept, views
    assert live_bytes(CPU) == before


SMALL = """
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, num_query_groups: 2, vocab_size: 256}
data: {max_length: 128}
train: {global_batch_size: 4}
plugins: {packing: {enabled: true, max_tokens: 256}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "num_ranks", "more"),
    [("megatron", 2, "train.recompute=true"), only_full("deepspeed", 1, "--also deepspeed.zero_stage=3")],
)
def test_profile_measures_a_real_trainer(tmp_path, trainer, num_ranks, more, ran):
    (tmp_path / "recipe.yaml").write_text(f"trainer: {trainer}{SMALL}")
    words = (*more.split(), "--nproc", str(num_ranks), "--out", "costs.yaml")
    result = ran(tmp_path, "profile", "recipe.yaml", *words, ranks=num_ranks, planted=QUICK)
    assert set(result) >= {"host", "passes", "update_s", "links", "fit_error", "samples", "out", "memory"}
    found = {(s["num"], s["length"], s["count"], s["cuts"]) for s in result["samples"]}
    assert found == {(c.num, c.length, c.count, c.cuts) for c in cases(128, 256)}
    costs = cost_models.load(str(tmp_path / "costs.yaml"), tmp_path)
    assert costs.forward.token_s > 0
    assert costs.backward.token_s > 0
    assert costs.update_s > 0
    assert not costs.recompute
    assert "evenload profile recipe.yaml" in costs.source
    assert result["busy"] == (costs.busy is not None)
    assert costs.busy is None or costs.busy.model_dump() == result["beside"]
    assert set(result["links"]) == ({"intra"} if num_ranks > 1 else set())
    assert (costs.intra is not None) == (num_ranks > 1)
    assert costs.inter is None
    assert costs.decode is not None
    assert costs.decode.model_dump() == result["decode"]
    assert min(costs.decode.step_s, costs.decode.prompt_s) > 0
    assert costs.decode.row_s + costs.decode.key_s > 0
    parameters = result["host"].get("parameters") or result["host"]["parameters_on_rank"]
    # Weights, gradients and two Adam states in float32 at least.
    assert costs.memory.fixed_bytes >= 16 * parameters
    assert costs.sharding == "optimizer"
    if trainer == "deepspeed":
        (gathered,) = (costs.by_sharding[name] for name in result["by_sharding"])
        assert costs.by_sharding == {"parameters": gathered}
        assert gathered.forward.launch_s > costs.forward.launch_s, "each layer's weights are gathered"
        assert gathered.memory.sharded_bytes >= 16 * parameters
        assert gathered.memory.gathered_bytes > costs.memory.gathered_bytes == 0
    # K and V: 2 x 2 heads of 16 in float32, 2 layers.
    assert costs.memory.kv_bytes_per_token == 2 * 2 * 16 * 4 * 2
    # At least the inputs of the seven projections of a layer: 4 x hidden and 2 x ffn values.
    assert costs.memory.activation_bytes_per_token > 2 * 4 * 4 * 64


@pytest.mark.slow
def test_degrees_of_tensor_parallelism_are_measured_into_one_file(tmp_path, ran, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(SMALL)
    words = ("--tp", "1,2", "--out", "costs.yaml")
    result = ran(tmp_path, "profile", "recipe.yaml", *words, ranks=2, planted=QUICK)
    assert set(result["by_tp"]) == {"1", "2"}
    costs = cost_models.load(str(tmp_path / "costs.yaml"), tmp_path)
    assert (costs.tp, set(costs.by_tp)) == (1, {2})
    # Bytes of both degrees are those of one model: what a rank holds follows from its layers.
    one, two = costs.memory, costs.by_tp[2].memory
    assert two.fixed_bytes == pytest.approx(one.fixed_bytes, rel=0.04)
    assert two.activation_bytes_per_token == pytest.approx(one.activation_bytes_per_token, rel=0.12)  # a tp-th: 0.25
    monkeypatch.chdir(tmp_path)
    recipe = load("recipe.yaml", ["costs=costs.yaml", "parallel.tp=2"])
    of_rank = PlanChain.of_recipe(recipe, recipe.layout(2)).context.costs.forward
    assert of_rank.token_s == pytest.approx(costs.by_tp[2].forward.token_s / 2)
    wrong = command(tmp_path, "profile", "recipe.yaml", "--tp", "3", "--nproc", "2", "--out", "costs.yaml")
    assert wrong.returncode == 2
    assert "does not divide the ranks" in wrong.stderr


@pytest.mark.slow
def test_profile_of_a_frozen_base(tmp_path, forged, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(SMALL)
    words = ("plugins.lora.enabled=true", "--out", "costs.yaml", "--json")
    done = forged(tmp_path, "profile", "recipe.yaml", *words, ranks=1, planted=QUICK)
    assert done.returncode == 0, done.stderr
    assert "bytes are counted, not measured, of a frozen base" in done.stderr
    costs = cost_models.load(str(tmp_path / "costs.yaml"), tmp_path)
    assert costs.frozen_base
    assert min(costs.forward.linear_s + costs.forward.launch_s, costs.backward.linear_s + costs.backward.launch_s) > 0
    # Weights alone, in float32.
    assert costs.memory.fixed_bytes == 4 * json.loads(done.stdout)["host"]["parameters_on_rank"] - _norms(2, 64) * 4
    assert costs.memory.gradient_bytes == costs.memory.update_bytes == 0
    monkeypatch.chdir(tmp_path)
    known = load("recipe.yaml", ["costs=costs.yaml", "plugins.lora.enabled=true"])
    assert PlanChain.of_recipe(known, known.layout(1)).context.costs.backward == costs.backward


def _norms(layers, hidden):
    """Weights that costs leave out: two norms of a layer, and the last one."""
    return (2 * layers + 1) * hidden
