"""How `verify` compares: what is off is told, by name, wherever it stands; small runs of both trainers are exact.

The runs are the ones in `make check` that train: each reaches branches that the others do not, and the mutants of
`tests/mutants` that are marked quick die in one of them.
"""

import json
import math

import pytest
import torch
from evenload.core.recipe.recipe import parse
from evenload.core.recipe.sections import Train
from evenload.integrations.reference.textbook import AdamState, AdamW
from evenload.training.proof.compare import (
    OVER_FLOOR,
    StepErrors,
    Tolerance,
    alike_in_all_layers,
    compare_gradients,
    compare_number,
    compare_update,
)
from evenload.training.proof.proven_steps import other_layout
from harness.cases import only_full

TOLERANCE = Tolerance.of("megatron", "fp32")


def gradient_errors(values, references, tolerance=TOLERANCE):
    errors = StepErrors()
    compare_gradients(errors, values, references, tolerance)
    return errors


def test_a_gradient_is_judged_by_its_own_bound():
    ones = {"a": torch.ones(4), "b": torch.ones(4)}
    assert gradient_errors(ones, ones).over == []
    off = gradient_errors({**ones, "b": 1.001 * torch.ones(4)}, ones)
    assert off.gradient.name == "b"
    assert off.over == ["gradient of b: 1.00e-03"]
    floors = Tolerance(0.0, 1.0, 1.0, 0.0, {"a": 1e-2, "b": 1e-3 / OVER_FLOOR * 1.01})
    above = {"a": 1.01 * ones["a"], "b": 1.001 * ones["b"]}
    assert gradient_errors(above, ones, floors).over == []
    # The largest error is not the worst: its parameter is allowed more.
    tight = Tolerance(0.0, 1.0, 1.0, 0.0, {"a": 1e-2, "b": 1e-5})
    (worst, *_) = gradient_errors(above, ones, tight).over
    assert worst.startswith("gradient of b")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_is_named(value):
    good = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    errors = gradient_errors({**good, "b": torch.tensor([1.0, value])}, good)
    assert errors.not_finite == ["gradient of b"]
    assert errors.over == ["gradient of b: inf"]


def test_a_gradient_that_plain_training_lacks_is_named():
    assert gradient_errors({"a": torch.ones(2)}, {}).over == ["plain training has no gradient of a"]


def test_floors_are_shared_by_layers():
    errors = {"layers.0.mlp.w": 1e-3, "layers.1.mlp.w": 5e-3, "head.w": 1e-4}
    assert alike_in_all_layers(errors) == {"layers.0.mlp.w": 5e-3, "layers.1.mlp.w": 5e-3, "head.w": 1e-4}


def test_numbers_that_are_none_are_infinitely_wrong():
    assert compare_number(math.nan, 1.0) == math.inf
    assert compare_number(1.0, math.nan) == math.inf
    assert compare_number(2.0, 1.0) == 1.0


def updated(**change):
    """Errors of a host that did what the textbook did, but for ``change``: of weight, moments, or what the forward
    uses."""
    start = {"w": torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)}
    plain = AdamW.of(start, Train(clip_grad=0.0))
    plain.step({"w": torch.ones(3, 4, dtype=torch.float64)}, 1.0, 0.01)
    state = plain.states["w"]
    host = AdamState(*(change.get(name, tensor.float()) for name, tensor in state._asdict().items()))
    errors = StepErrors()
    compare_update(errors, {"w": change.get("used", host.weight)}, {"w": host}, plain, start, TOLERANCE)
    return errors


def test_an_update_is_judged_by_what_it_moved():
    assert updated().over == []
    start = torch.linspace(-1, 1, 12).view(3, 4)
    assert updated(weight=start).over == ["weight w: 1.00e+00"]
    assert updated(weight=start - 0.0102).over == ["weight w: 2.00e-02"]
    assert updated(exp_avg=torch.full((3, 4), 0.11)).over == ["moment exp_avg of w: 1.00e-01"]
    assert updated(exp_avg_sq=torch.zeros(3, 4)).over == ["moment exp_avg_sq of w: 1.00e+00"]
    assert updated(used=start).over == ["the forward uses other weights of w than the optimizer holds"]
    bad = updated(weight=torch.full((3, 4), math.nan))
    assert bad.not_finite == ["weight w"]
    assert "weight w: inf" in bad.over


V_SHAPE = {"pipeline": {"enabled": True, "v_shape": True}}


def recipe(**sections):
    return parse({"model": {"num_layers": 2, "vocab_size": 256}, "train": {"global_batch_size": 8}, **sections})


def test_a_run_resumes_on_another_layout_where_there_is_one():
    other = other_layout(recipe(parallel={"dp": 2}), 2)
    assert (other.parallel.pp, other.parallel.dp) == (2, 1)
    back = other_layout(recipe(parallel={"pp": 2}), 4)
    assert (back.parallel.pp, back.parallel.dp) == (1, 4)
    experts = {"family": "mixtral", "moe": {"num_experts": 4}}
    elsewhere = other_layout(recipe(parallel={"dp": 2, "ep": 2}, model=experts), 2)
    assert (elsewhere.parallel.pp, elsewhere.parallel.ep, elsewhere.parallel.dp) == (2, 1, 1)
    flat = other_layout(recipe(parallel={"pp": 2}, model={"num_layers": 4}, plugins=V_SHAPE), 2)
    assert (flat.parallel.pp, flat.v_shape) == (1, False)
    copies = {"parallel": {"ep": 2}, "model": experts, "plugins": {"moe": {"enabled": True}}}
    assert other_layout(recipe(**copies), 2) is None, "ranks that share experts go on sharing them"
    four = other_layout(recipe(**copies), 4)
    assert (four.parallel.pp, four.parallel.ep, four.parallel.dp) == (2, 2, 2)
    assert other_layout(recipe(parallel={"tp": 2}), 2) is None
    assert other_layout(recipe(parallel={"dp": 2}, model={"num_layers": 3}), 2) is None
    assert other_layout(recipe(parallel={"dp": 2}, trainer="deepspeed"), 2) is None


TINY = """
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}
data: {max_length: 160, long_samples: truncate}
train: {global_batch_size: 6, lr: 1.0e-2, weight_decay: 0.1, clip_grad: 0.3, lr_schedule: linear}
"""
PACKED = "plugins.packing.enabled=true"
V_OF_STAGES = ("parallel.pp=2", "model.num_layers=4") + tuple(
    f"plugins.pipeline.{word}" for word in ("enabled=true", "v_shape=true", "max_tokens=64")
)
RUNS = {
    "megatron, overlapped reduction": (
        ("parallel.dp=2", PACKED, "plugins.packing.max_tokens=96", "megatron.overlap_grad_reduce=true"),
        {"cut sequences", "ranks without any pass", "gradient sum after the passes"},
    ),
    "megatron, tensor parallel": (
        ("parallel.tp=2", "train.dtype=fp64", PACKED, "plugins.packing.max_tokens=320", "--weights"),
        {"several sequences in a micro-batch"},
    ),
    "megatron, stages, recompute": (
        ("parallel.pp=2", "train.recompute=true", "train.dtype=fp64", PACKED, "plugins.packing.max_tokens=64")
        + ("model.num_layers=3", "parallel.layers=[2, 1]"),
        {"cut sequences", "replayed forwards", "regrouped backward"},
    ),
    "megatron, shared slices": (
        ("parallel.dp=2", "train.dtype=fp64", "plugins.mesh.enabled=true", "plugins.mesh.engines=ring")
        + ("plugins.mesh.max_tokens=48", "--weights"),
        {"cut sequences", "attention shared by ring"},
    ),
    "megatron, a V of stages": (V_OF_STAGES, {"cut sequences", "an order of the plan's own"}),
    "megatron, two of a V": (
        (*V_OF_STAGES, "parallel.dp=2", "megatron.overlap_grad_reduce=true"),
        {"cut sequences", "an order of the plan's own"},
    ),
    "deepspeed": (
        ("trainer=deepspeed", "parallel.dp=2", PACKED, "plugins.packing.max_tokens=96", "--weights"),
        {"cut sequences", "idle ranks"},
    ),
    "deepspeed, stages": (
        ("trainer=deepspeed", "parallel.pp=2", "parallel.dp=2", PACKED)
        + ("plugins.packing.max_tokens=64", "plugins.packing.activation_gib=0.0006", "--weights"),
        {"cut sequences", "replayed forwards", "ranks without any pass"},
    ),
}


FURTHER = ("megatron, two of a V", "megatron, a V of stages")
"""Of the full run."""


@pytest.mark.parametrize("name", [only_full(name) if name in FURTHER else name for name in RUNS])
def test_a_small_run_is_exact(name, tmp_path, forged):
    words, reached = RUNS[name]
    (tmp_path / "tiny.yaml").write_text(TINY)
    done = forged(tmp_path, "verify", "tiny.yaml", *words, "--json")
    assert done.stdout, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["exact"], (result["over"], result["not_finite"], result["samples_wrong"])
    assert done.returncode == 0
    assert reached <= result["branches"].keys(), (result["branches"], result["branches_not_taken"])
    assert result["resumed"]["at_step"] == 2
    assert result["steps"] == 3
