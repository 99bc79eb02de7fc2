"""Save, load and go on: bit for bit on the same layout, to rounding on another one."""

from __future__ import annotations

import json
import shutil

import pytest

pytestmark = pytest.mark.slow

PADDED = {"model__tied_embeddings": True, "parallel__pp": 2, "model__vocab_size": 97}
"""A stage's copy of the tied embedding has a bucket of its own, of 3104 elements where Megatron cuts at 128."""
KINDS = [
    pytest.param({"train__dtype": "fp32"}, id="fp32"),
    pytest.param({"train__dtype": "fp32", "megatron__distributed_optimizer": False}, id="fp32 unsharded"),
    pytest.param({"train__dtype": "bf16"}, id="bf16"),
    pytest.param({"train__dtype": "bf16", "megatron__distributed_optimizer": False}, id="bf16 unsharded"),
    pytest.param({"train__dtype": "fp64"}, id="fp64"),
    pytest.param({"train__dtype": "fp32", **PADDED}, id="fp32, padding between buckets"),
]


@pytest.fixture(scope="module")
def begun(on_ranks, tmp_path_factory):
    """``begun(kind)``: six steps on two ranks, and a checkpoint of the first three, made once for each kind."""
    runs = {}

    def run(kind):
        key = str(sorted(kind.items()))
        if key not in runs:
            there = tmp_path_factory.mktemp("begun") / "c"
            whole = on_ranks(2, "train", steps=6, **kind)[0]
            on_ranks(2, "train", steps=3, write=str(there), **kind)
            runs[key] = whole, there
        return runs[key]

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bit_equal_on_the_same_layout(on_ranks, begun, kind):
    whole, there = begun(kind)
    resumed = on_ranks(2, "train", first=3, steps=3, read=str(there), **kind)[0]
    assert resumed["losses"] == whole["losses"][3:]
    assert resumed["norms"] == whole["norms"][3:]
    assert resumed["weights"] == whole["weights"]
    assert resumed["draws"] == whole["draws"][3:]
    assert len({draw for of_step in whole["draws"] for draw in of_step}) == 4 * 6, "each generator goes on"


def test_resume_with_upstreams_shared_step_is_wrong(on_ranks, begun):
    """Why `load_optimizer` exists: the first resumed loss would be right, later ones not."""
    kind = {"train__dtype": "fp32"}
    whole, there = begun(kind)
    resumed = on_ranks(2, "train", first=3, steps=3, read=str(there), mutant="shared step", **kind)[0]
    assert resumed["losses"][0] == whole["losses"][3]
    assert resumed["losses"][1:] != whole["losses"][4:]


ELSEWHERE = {
    "one": (1, {}),
    "tp2": (2, {"parallel__tp": 2}),
    "pp2": (2, {"parallel__pp": 2}),
    "tp2pp2": (4, {"parallel__tp": 2, "parallel__pp": 2}),
}


@pytest.mark.parametrize(
    ("size", "layout", "kind"),
    [
        pytest.param(*ELSEWHERE[name], *kind.values, id=f"{name}-{kind.id}")
        for kind, names in zip(KINDS, (ELSEWHERE, ("one", "tp2pp2"), ("tp2pp2",)), strict=False)
        for name in names
    ],
)
def test_resume_on_another_layout_goes_on_to_rounding(on_ranks, begun, tmp_path, size, layout, kind):
    near = 5e-3 if kind["train__dtype"] == "bf16" else 1e-5
    whole, there = begun(kind)
    for resumed in on_ranks(size, "train", first=3, steps=3, read=str(there), **kind, **layout):
        assert resumed["losses"] == pytest.approx(whole["losses"][3:], rel=near)
    other = str(tmp_path / "other")
    on_ranks(size, "train", steps=3, write=other, **kind, **layout)
    back = on_ranks(2, "train", first=3, steps=3, read=other, **kind)[0]
    assert back["losses"] == pytest.approx(whole["losses"][3:], rel=near)


def test_stages_may_have_other_numbers_of_layers_when_a_run_goes_on(on_ranks, tmp_path):
    """2 | 2 to 1 | 3 and back: gradients and norms sum over other stages, and nothing else differs."""
    kind = {"train__dtype": "fp32", "parallel__pp": 2}
    layouts = {"equal": {}, "unequal": {"parallel__layers": [1, 3]}}
    whole = {name: on_ranks(2, "train", steps=6, **kind, **layout)[0] for name, layout in layouts.items()}
    assert whole["unequal"]["losses"] == pytest.approx(whole["equal"]["losses"], rel=1e-5)
    for name, other in (("equal", "unequal"), ("unequal", "equal")):
        there = str(tmp_path / name)
        on_ranks(2, "train", steps=3, write=there, **kind, **layouts[name])
        same = on_ranks(2, "train", first=3, steps=3, read=there, **kind, **layouts[name])[0]
        assert same["losses"] == whole[name]["losses"][3:]
        assert same["draws"] == whole[name]["draws"][3:]
        elsewhere = on_ranks(2, "train", first=3, steps=3, read=there, **kind, **layouts[other])[0]
        assert elsewhere["losses"] == pytest.approx(whole[name]["losses"][3:], rel=1e-5)


def test_a_fresh_host_can_be_saved_and_read(on_ranks, tmp_path):
    whole = on_ranks(2, "train", steps=2, train__dtype="fp32")[0]
    on_ranks(2, "train", steps=0, write=str(tmp_path / "c"), train__dtype="fp32")
    resumed = on_ranks(2, "train", steps=2, read=str(tmp_path / "c"), train__dtype="fp32", train__seed=8)[0]
    assert resumed["losses"] == whole["losses"]


def test_what_is_no_checkpoint_of_this_model_is_refused_on_every_rank(on_ranks, begun, tmp_path):
    (_, there), torn = begun({"train__dtype": "fp32"}), tmp_path / "torn"
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
            assert word in error[0]
            assert all(error)
    assert on_ranks(2, "load_error", folder=str(there), train__dtype="fp32") == [[], []]


def test_a_checkpoint_is_never_written_over_something(on_ranks, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    for folder in ("full", "missing"):
        for message, _ in on_ranks(2, "save_error", folder=str(tmp_path / folder)):
            assert "cannot take a checkpoint" in message
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["precious"]


def test_files_are_in_megatrons_own_format(begun):
    """Every load in this module goes through stock ``dist_checkpointing.load``, with no strategy of ours."""
    _, there = begun({"train__dtype": "fp32"})
    assert {"metadata.json", ".metadata", "common.pt"} <= {p.name for p in there.iterdir()}
    assert json.loads((there / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_a_disk_that_refuses_is_told_on_every_rank(on_ranks, tmp_path):
    """One stage may write no file longer than 2 KiB: all raise, and nothing that looks like a checkpoint is left."""
    (tmp_path / "c").mkdir()
    for message, found in on_ranks(2, "save_error", folder=str(tmp_path / "c"), limit_rank=1, parallel__pp=2):
        assert "could not be written" in message
        assert "rank 1" in found
    assert not (tmp_path / "c" / "metadata.json").exists()
