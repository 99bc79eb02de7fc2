"""Training steps: the same on every layout, whatever numbers of micro-batches the ranks run; what is refused."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from harness.cases import full, only_full

pytestmark = pytest.mark.slow

TWO_TWO = [[0, [1, 3]], [1, [6]], [0, [4, 0]], [1, [5, 2, 7]]]
THREE_THREE = [[0, [1]], [1, [3]], [0, [6]], [1, [4]], [0, [0, 2]], [1, [5, 7]]]
ONE_FOUR = [[0, [2]], [1, [0, 1]], [1, [3, 4]], [1, [5]], [1, [6, 7]]]
IDLE = [[0, [2, 1]], [0, [0, 3, 6]], [0, [4, 5, 7]]]
LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"parallel__tp": 2}),
    "pp2": (2, {"parallel__pp": 2}),
    "dp2pp2": (4, {"parallel__pp": 2}),
    "tp2pp2": (4, {"parallel__tp": 2, "parallel__pp": 2}),
}


AT_EVERY_CHANGE = {("dp2", "bf16"), ("tp2", "fp32"), ("pp2", "bf16"), ("dp2pp2", "fp32"), ("tp2pp2", "fp64")}
"""Each layout once, and each dtype."""


@pytest.fixture(scope="module")
def alone(on_ranks):
    """``alone("fp32")``: losses and norms of one rank."""
    return functools.cache(lambda dtype: on_ranks(1, "train", train__dtype=dtype)[0])


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(*LAYOUTS["dp2"], id="dp2"),
        pytest.param(*LAYOUTS["tp2pp2"], id="tp2pp2"),
        *(only_full(*LAYOUTS[name], id=name) for name in ("tp2", "pp2", "dp2pp2")),
    ],
)
def test_every_layout_starts_from_the_same_weights(on_ranks, size, layout):
    (whole,) = on_ranks(1, "initial_weights", model__family="qwen2")
    found = {}
    for part in on_ranks(size, "initial_weights", model__family="qwen2", **layout):
        found.update(part)
    assert found.keys() == whole.keys()
    for name, weight in whole.items():
        assert np.array_equal(found[name], weight), name


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(layout, dtype, marks=[] if (layout, dtype) in AT_EVERY_CHANGE else full)
        for layout in LAYOUTS
        for dtype in ("fp64", "fp32", "bf16")
    ],
)
def test_every_layout_trains_alike(on_ranks, alone, layout, dtype):
    size, changes = LAYOUTS[layout]
    near = {"fp64": 1e-6, "fp32": 1e-5, "bf16": 5e-3}[dtype]
    for result in on_ranks(size, "train", train__dtype=dtype, **changes):
        assert result["losses"] == pytest.approx(alone(dtype)["losses"], rel=near)
        assert result["norms"] == pytest.approx(alone(dtype)["norms"], rel=20 * near)
        assert result["targets"] == alone(dtype)["targets"]


@pytest.mark.parametrize(
    ("clip", "sharded"),
    [
        pytest.param(0.0, False, id="no clipping"),
        pytest.param(0.1, True, id="clipping, distributed optimizer"),
        only_full(0.1, False, id="clipping"),
        only_full(0.0, True, id="no clipping, distributed optimizer"),
    ],
)
def test_optimizers_and_clipping_agree_with_float64(on_ranks, sharded, clip):
    options = {"megatron__distributed_optimizer": sharded, "train__clip_grad": clip, "train__weight_decay": 0.1}
    exact = on_ranks(2, "train", train__dtype="fp64", **options)[0]
    for result in on_ranks(2, "train", train__dtype="fp32", **options):
        assert result["losses"] == pytest.approx(exact["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(exact["norms"], rel=1e-3)
        assert result["weights"] == pytest.approx(exact["weights"], rel=1e-4)


@pytest.mark.parametrize("size", [only_full(2), 4])
def test_overlapped_reduction_is_exact_for_changing_numbers_of_micro_batches(on_ranks, size):
    plans = [TWO_TWO, THREE_THREE, ONE_FOUR, IDLE, IDLE, THREE_THREE, TWO_TWO, ONE_FOUR]
    layout = {"parallel__pp": size // 2}
    for errors in on_ranks(size, "summed_gradients", plans=plans, megatron__overlap_grad_reduce=True, **layout):
        assert max(errors) < 1e-9


def test_overlap_without_a_protocol_is_wrong(on_ranks):
    """Why `Reduction` exists: one more micro-batch than in the first step, and the sum starts too early."""
    plans = [TWO_TWO, *[THREE_THREE] * 5]
    errors = on_ranks(2, "summed_gradients", plans=plans, megatron__overlap_grad_reduce=True, mutant="naive overlap")
    assert errors[0][0] < 1e-9
    assert max(map(max, errors)) > 1e-3


@pytest.mark.parametrize("dtype", ["fp32", only_full("bf16")])
def test_overlap_trains_as_without_it(on_ranks, dtype):
    options = {"plans": [TWO_TWO, THREE_THREE, IDLE], "steps": 4, "train__dtype": dtype}
    plain = on_ranks(2, "train", **options)[0]
    for result in on_ranks(2, "train", megatron__overlap_grad_reduce=True, **options):
        assert result["losses"] == plain["losses"]
        assert result["weights"] == plain["weights"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"parallel__cp": 2}, "context parallel"),
        ({"parallel__ep": 2}, "experts"),
        ({"model__vocab_size": None}, "vocab_size"),
        ({"model__vocab_size": 97, "parallel__tp": 2}, "vocab_size"),
        ({"model__config": "config.json"}, "Hugging Face"),
    ],
)
def test_what_cannot_be_honoured_is_refused_when_the_host_is_opened(on_ranks, changes, word):
    for error in on_ranks(2, "refusal", **changes):
        assert word in error
        assert "found: " in error
        assert "do: " in error


def test_a_plan_that_cannot_be_run_changes_nothing(on_ranks):
    words = {
        "cut": "without an order",
        "ranks": "data-parallel ranks",
        "shared": "shared",
        "stages": "pipeline stages",
    }
    (told,) = on_ranks(1, "bad_plans")
    assert told.keys() == words.keys()
    assert all(words[kind] in text for kind, text in told.items()), told


def test_weights_that_cancel_out_are_refused_on_all_ranks(on_ranks):
    for error in on_ranks(2, "cancelled"):
        assert "add up to nothing that its loss can be divided by" in error
        assert "found: sum 0 over 205 targets of 8 sequences" in error
