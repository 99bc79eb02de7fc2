"""Save, load and go on: bit for bit on the same layout, to rounding on another one."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow

PADDED = {"model__tied_embeddings": True, "parallel__pp": 2, "model__vocab_size": 97}
"""A stage's copy of the tied embedding has a bucket of its own, of 3104 elements where Megatron cuts at 128."""
UNSHARDED = {"megatron__distributed_optimizer": False}
KINDS = {
    "fp32": {"train__dtype": "fp32"},
    "bf16": {"train__dtype": "bf16"},
    "fp64": {"train__dtype": "fp64"},
    "fp32, padding between buckets": {"train__dtype": "fp32", **PADDED},
    "fp32 unsharded": {"train__dtype": "fp32", **UNSHARDED},
    "bf16 unsharded": {"train__dtype": "bf16", **UNSHARDED},
}
FIRST, LAST = {"steps": 2}, {"first": 2, "steps": 2}


@pytest.fixture(scope="module")
def begun(on_ranks, tmp_path_factory):
    """``begun("fp32")``: four steps on two ranks, and a checkpoint of the first two, made once for each kind."""

    @functools.cache
    def run(kind):
        there = tmp_path_factory.mktemp("begun") / "c"
        whole = on_ranks(2, "train", steps=4, **KINDS[kind])[0]
        on_ranks(2, "train", write=str(there), **FIRST, **KINDS[kind])
        return whole, there

    return run


@pytest.mark.parametrize("kind", [*list(KINDS)[:4], *map(only_full, list(KINDS)[4:])])
def test_resume_is_bit_equal_on_the_same_layout(on_ranks, begun, kind):
    whole, there = begun(kind)
    resumed = on_ranks(2, "train", read=str(there), **LAST, **KINDS[kind])[0]
    assert resumed["losses"] == whole["losses"][2:]
    assert resumed["norms"] == whole["norms"][2:]
    assert resumed["weights"] == whole["weights"]
    assert resumed["draws"] == whole["draws"][2:]
    assert len({draw for of_step in whole["draws"] for draw in of_step}) == 4 * 4, "each generator goes on"


def test_resume_with_upstreams_shared_step_is_wrong(on_ranks, begun):
    """Why `load_optimizer` exists: the first resumed loss would be right, later ones not."""
    whole, there = begun("fp32")
    resumed = on_ranks(2, "train", read=str(there), mutant="shared step", **LAST, **KINDS["fp32"])[0]
    assert resumed["losses"][0] == whole["losses"][2]
    assert resumed["losses"][1:] != whole["losses"][3:]


TP2PP2 = {"parallel__tp": 2, "parallel__pp": 2}


@pytest.mark.parametrize(
    ("size", "layout", "kind"),
    [
        pytest.param(1, {}, "fp32", id="one-fp32"),
        pytest.param(4, TP2PP2, "bf16", id="tp2pp2-bf16"),
        only_full(2, {"parallel__tp": 2}, "fp32", id="tp2-fp32"),
        only_full(2, {"parallel__pp": 2}, "fp32", id="pp2-fp32"),
        only_full(4, TP2PP2, "fp32", id="tp2pp2-fp32"),
        only_full(1, {}, "fp32 unsharded", id="one-fp32 unsharded"),
        only_full(4, TP2PP2, "fp32 unsharded", id="tp2pp2-fp32 unsharded"),
    ],
)
def test_resume_on_another_layout_goes_on_to_rounding(on_ranks, begun, tmp_path, size, layout, kind):
    near = 5e-3 if kind == "bf16" else 1e-5
    whole, there = begun(kind)
    for resumed in on_ranks(size, "train", read=str(there), **LAST, **KINDS[kind], **layout):
        assert resumed["losses"] == pytest.approx(whole["losses"][2:], rel=near)
    other = str(tmp_path / "other")
    on_ranks(size, "train", write=other, **FIRST, **KINDS[kind], **layout)
    back = on_ranks(2, "train", read=other, **LAST, **KINDS[kind])[0]
    assert back["losses"] == pytest.approx(whole["losses"][2:], rel=near)


@pytest.mark.parametrize(("before", "after"), [("equal", "unequal"), only_full("unequal", "equal")])
def test_stages_may_have_other_numbers_of_layers_when_a_run_goes_on(on_ranks, tmp_path, before, after):
    """2 | 2 to 1 | 3 or back: gradients and norms sum over other stages, and nothing else differs."""
    layouts = {
        name: {**KINDS["fp32"], "parallel__pp": 2, **more}
        for name, more in {"equal": {}, "unequal": {"parallel__layers": [1, 3]}}.items()
    }
    there = str(tmp_path / "c")
    whole = on_ranks(2, "train", steps=4, **layouts[before])[0]
    on_ranks(2, "train", write=there, **FIRST, **layouts[before])
    same = on_ranks(2, "train", read=there, **LAST, **layouts[before])[0]
    assert same["losses"] == whole["losses"][2:]
    assert same["draws"] == whole["draws"][2:]
    elsewhere = on_ranks(2, "train", read=there, **LAST, **layouts[after])[0]
    assert elsewhere["losses"] == pytest.approx(whole["losses"][2:], rel=1e-5)


def test_a_fresh_host_can_be_saved_and_read(on_ranks, tmp_path):
    whole = on_ranks(2, "train", steps=2, train__dtype="fp32")[0]
    on_ranks(2, "train", steps=0, write=str(tmp_path / "c"), train__dtype="fp32")
    resumed = on_ranks(2, "train", steps=2, read=str(tmp_path / "c"), train__dtype="fp32", train__seed=8)[0]
    assert resumed["losses"] == whole["losses"]


def test_what_is_no_checkpoint_of_this_model_is_refused_on_every_rank(on_ranks, begun, tmp_path):
    (_, there), torn = begun("fp32"), tmp_path / "torn"
    shutil.copytree(there, torn)
    (torn / "metadata.json").unlink()
    cases = [
        ({"folder": str(tmp_path / "nowhere")}, "no complete"),
        ({"folder": str(torn)}, "no complete"),
        ({"folder": str(there), "model__num_layers": 2}, "another model"),
        ({"folder": str(there), "train__dtype": "bf16"}, "another dtype"),
        ({"folder": str(there), "train__freeze": ["embedding.*"]}, "another freeze"),
        ({"folder": str(there), "megatron__distributed_optimizer": False}, "another distributed optimizer"),
    ]
    for case, word in cases:
        for error in on_ranks(2, "load_error", **({"train__dtype": "fp32"} | case)):
            assert word in error
            assert "found: " in error
            assert "do: " in error
    assert on_ranks(2, "load_error", folder=str(there), train__dtype="fp32") == ["", ""]


def test_a_checkpoint_is_never_written_over_something(on_ranks, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    for folder in ("full", "missing"):
        for message in on_ranks(2, "save_error", folder=str(tmp_path / folder)):
            assert "cannot take a checkpoint" in message
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["precious"]


def test_files_are_in_megatrons_own_format(begun):
    """Every load in this module goes through stock ``dist_checkpointing.load``, with no strategy of ours."""
    _, there = begun("fp32")
    assert {"metadata.json", ".metadata", "common.pt"} <= {p.name for p in there.iterdir()}
    assert json.loads((there / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_a_disk_that_refuses_is_told_on_every_rank(on_ranks, tmp_path):
    """One stage may write no file longer than 2 KiB: all raise, and nothing that looks like a checkpoint is left."""
    (tmp_path / "c").mkdir()
    for message in on_ranks(2, "save_error", folder=str(tmp_path / "c"), limit_rank=1, parallel__pp=2):
        assert "could not be written" in message
        assert "rank 1" in message
    assert not (tmp_path / "c" / "metadata.json").exists()
