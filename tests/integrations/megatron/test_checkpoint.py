"""Save, load and go on: bit for bit on the same layout, to rounding on another one."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

KINDS = [
    pytest.param({"train__dtype": "fp32"}, id="fp32"),
    pytest.param({"train__dtype": "fp32", "megatron__distributed_optimizer": False}, id="fp32 unsharded"),
    pytest.param({"train__dtype": "bf16"}, id="bf16"),
    pytest.param({"train__dtype": "bf16", "megatron__distributed_optimizer": False}, id="bf16 unsharded"),
    pytest.param({"train__dtype": "fp64"}, id="fp64"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bit_equal_on_the_same_layout(on_ranks, tmp_path, kind):
    whole = on_ranks(2, "train", steps=6, **kind)[0]
    on_ranks(2, "train", steps=3, write=str(tmp_path / "c"), **kind)
    resumed = on_ranks(2, "train", first=3, steps=3, read=str(tmp_path / "c"), **kind)[0]
    assert resumed["losses"] == whole["losses"][3:]
    assert resumed["norms"] == whole["norms"][3:]
    assert resumed["weights"] == whole["weights"]


def test_resume_with_upstreams_shared_step_is_wrong(on_ranks, tmp_path):
    """Why `load_optimizer` exists: the first resumed loss would be right, later ones not."""
    whole = on_ranks(2, "train", steps=6, train__dtype="fp32")[0]
    on_ranks(2, "train", steps=3, write=str(tmp_path / "c"), train__dtype="fp32")
    resumed = on_ranks(
        2, "train", first=3, steps=3, read=str(tmp_path / "c"), train__dtype="fp32", mutant="shared step"
    )[0]
    assert resumed["losses"][0] == whole["losses"][3]
    assert resumed["losses"][1:] != whole["losses"][4:]


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[2]])
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(2, {"parallel__tp": 2}, id="tp2"),
        pytest.param(2, {"parallel__pp": 2}, id="pp2"),
        pytest.param(4, {"parallel__tp": 2, "parallel__pp": 2}, id="tp2pp2"),
    ],
)
def test_resume_on_another_layout_goes_on_to_rounding(on_ranks, tmp_path, size, layout, kind):
    near = 5e-3 if kind["train__dtype"] == "bf16" else 1e-5
    whole = on_ranks(2, "train", steps=6, **kind)[0]
    on_ranks(2, "train", steps=3, write=str(tmp_path / "c"), **kind)
    there = str(tmp_path / "c")
    for resumed in on_ranks(size, "train", first=3, steps=3, read=there, **kind, **layout):
        assert resumed["losses"] == pytest.approx(whole["losses"][3:], rel=near)
    other = str(tmp_path / "other")
    on_ranks(size, "train", steps=3, write=other, **kind, **layout)
    back = on_ranks(2, "train", first=3, steps=3, read=other, **kind)[0]
    assert back["losses"] == pytest.approx(whole["losses"][3:], rel=near)


def test_a_fresh_host_can_be_saved_and_read(on_ranks, tmp_path):
    whole = on_ranks(2, "train", steps=2, train__dtype="fp32")[0]
    on_ranks(2, "train", steps=0, write=str(tmp_path / "c"), train__dtype="fp32")
    resumed = on_ranks(2, "train", steps=2, read=str(tmp_path / "c"), train__dtype="fp32", train__seed=8)[0]
    assert resumed["losses"] == whole["losses"]
