"""Tokens that tensor-parallel ranks divide between blocks, against plain training in which every rank has them all."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from megatron_tests.exact import exact

pytestmark = pytest.mark.slow

LENGTHS = (37, 5, 64, 2)
DIVIDED = {"parallel__tp": 2, "megatron__sequence_parallel": True}
TWO = {"model__num_layers": 2, **DIVIDED}
STAGES = {"parallel__pp": 2, **DIVIDED}
BIASED = {"score": "sigmoid", "bias_rate": 0.01, "z_loss": 0.02, "sequence_aux_loss": 0.05}
PACKS = {"packing": {"enabled": True, "max_tokens": 96}}
SLICES = {"packing": {"enabled": True, "max_tokens": 40}}


@pytest.mark.parametrize("family", ["llama", "gpt", "qwen3"])
def test_whole_samples(on_ranks, family):
    """Packs of odd lengths; with biases, and with norms of queries and keys."""
    exact(on_ranks(2, "proven", model__family=family, **DIVIDED), DIVIDED)


@pytest.mark.parametrize(
    ("size", "layout", "how"),
    [
        pytest.param(2, TWO, {"plans": [2, 6, 9, 4]}, id="tp2"),
        pytest.param(2, TWO, {"plans": [4], "train__recompute": True, "drawn": {"recompute": False}}, id="recompute"),
        only_full(4, STAGES, {"plans": [0, 1, 2]}, id="tp2pp2"),
        pytest.param(
            4,
            STAGES,
            {"plans": [2], "drawn": {"asymmetric": True, "replay": "some"}},
            id="other groups in backward",
        ),
    ],
)
def test_cut_samples(on_ranks, size, layout, how):
    exact(on_ranks(size, "proven", lengths=LENGTHS, **how, **layout), layout, LENGTHS)


@pytest.mark.parametrize(
    "plans", [pytest.param(["pairs"], id="ring"), only_full(["pairs, all_to_all", "shared 0"], id="more")]
)
def test_samples_that_ranks_share(on_ranks, plans):
    exact(on_ranks(4, "proven", plans=plans, **TWO), TWO)


@pytest.mark.parametrize(
    ("size", "ep", "plugins"),
    [
        pytest.param(2, 1, SLICES, id="2-1-slices"),
        pytest.param(4, 2, PACKS, id="4-2-packs"),
        only_full(2, 1, PACKS, id="2-1-packs"),
        only_full(4, 2, SLICES, id="4-2-slices"),
    ],
)
def test_experts(on_ranks, size, ep, plugins):
    """Cut by tensor parallelism, and divided among data-parallel ranks."""
    shared = {"shared_ffn_hidden_size": 16} if plugins is PACKS else {}
    rows = on_ranks(size, "routed", moe=BIASED | shared, plugins=plugins, parallel__ep=ep, copies=False, **DIVIDED)
    for of_step in zip(*rows, strict=True):
        assert set().union(*(one["names"] for one in of_step)) == set(of_step[0]["expected"])
        for one in of_step:
            assert one["grad"] < 1e-9
            assert one["loss"] < 1e-12
            assert one["norm"] < 1e-9
            assert one["biases"] == one["miscounted"] == []


def test_the_loss_is_that_of_one_rank(on_ranks):
    """The same initial weights; Megatron's cross-entropy is float32 inside, so other parts of it round otherwise."""
    losses = [
        on_ranks(size, "expert_steps", moe=BIASED, plugins=PACKS, **more)[0]["losses"]
        for size, more in ((1, {}), (2, DIVIDED))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_checkpoint_does_not_know_of_it(on_ranks, tmp_path):
    folder = str(tmp_path / "saved")
    experts = {"moe": BIASED, "plugins": PACKS}
    on_ranks(4, "expert_steps", steps=1, write=folder, parallel__ep=2, **experts, **DIVIDED)
    whole = on_ranks(4, "expert_steps", steps=2, parallel__ep=2, **experts, **DIVIDED)[0]["losses"]
    for size, layout in ((4, {"parallel__ep": 2, **DIVIDED}), (2, {"parallel__ep": 2})):
        resumed = on_ranks(size, "expert_steps", steps=1, first=1, read=folder, **experts, **layout)[0]["losses"]
        assert resumed == pytest.approx(whole[1:], rel=1e-6)


@pytest.mark.parametrize("divided", [only_full(False, id="whole"), pytest.param(True, id="divided")])
def test_the_peak_of_a_rank_is_what_was_predicted_of_it(on_ranks, divided):
    (memory,) = on_ranks(1, "measured_memory")
    for found in on_ranks(2, "peaks", memory=memory, parallel__tp=2, megatron__sequence_parallel=divided):
        assert found["peak"] == pytest.approx(found["measured"], rel=0.05)
        assert found["activations"] == pytest.approx(found["activations_measured"], rel=0.05)


def test_what_does_not_compose_is_refused(on_ranks):
    cases = [
        {"megatron__sequence_parallel": True},
        {"parallel__tp": 2, "moe": {}},
        {**DIVIDED, "moe": {}, "plugins": {"moe": {"enabled": True}}},
        {**DIVIDED, "moe": {"capacity_factor": 1.0}},
        {**DIVIDED, "moe": {"dispatcher": "allgather"}},
        {**DIVIDED, "moe": {}, "plugins": PACKS},
    ]
    said = on_ranks(2, "refused_recipes", cases=cases)[0]
    words = ["there is one", "wants sequence parallelism", "cannot be copied", "capacity", "equally many tokens"]
    assert all(word in what for word, what in zip(words, said, strict=False))
    assert said[-1] == ""
