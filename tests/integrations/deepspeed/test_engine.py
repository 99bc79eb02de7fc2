"""Planned steps on the real DeepSpeed engine against plain training of the same weights; 2 gloo ranks."""

from __future__ import annotations

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow

PACKS = ["packs", "packs, padded", "packs, idle", "packs, forwards first"]
BF16 = {"grad": 3e-2, "norm": 3e-2}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_those_of_plain_training(exactness, stage):
    first, second = (result["describe"] for result in exactness(2, stage=stage, names=PACKS))
    assert first["zero_stage"] == stage
    assert first["parameters"] == second["parameters"] > 10_000


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.full
def test_weights_that_add_up_to_0_train_by_their_divisor(exactness, stage):
    exactness(2, stage=stage, names=["packs", "packs, idle", "packs, in step"], drawings=20)


@pytest.mark.parametrize(
    ("ranks", "stage", "names"),
    [
        (2, 0, ["packs", "slices, half replayed"]),
        (2, 1, ["packs", "slices, half replayed"]),
        only_full(2, 2, [*PACKS, "slices, half replayed", "regrouped"]),
        (2, 3, ["packs", "5"]),
        only_full(4, 1, ["ring", "chain"]),
        only_full(4, 3, ["ring", "hybrid", "chain, half replayed"]),
    ],
)
def test_bf16_within_its_rounding(exactness, ranks, stage, names):
    exactness(ranks, 1e-2, BF16, stage=stage, recompute=stage >= 2, dtype="bf16", names=names)


FAULTS = [
    (["packs"], ["moved border", "restarted position", "dropped token", "wrong scale"]),
    (["slices, half replayed"], ["dropped accumulator", "loss booked twice", "restarted positions"]),
    (["packs, in step"], ["flag not cleared"]),
]


@pytest.mark.parametrize(
    ("stage", "names", "faults"),
    [
        *((1, *row) for row in FAULTS[:2]),
        (3, *FAULTS[2]),
        *(only_full(stage, *FAULTS[0]) for stage in (0, 2, 3)),
    ],
)
def test_planted_faults_are_caught(unnoticed, stage, names, faults):
    assert unnoticed(2, faults, stage=stage, names=names) == []


RUNS = {
    0: {"name": "packs"},
    1: {"name": "packs, idle"},
    2: {"name": "slices, half replayed"},
    3: {"name": "5", "recompute": True},
}


@pytest.mark.parametrize("clip_grad", [0.5, only_full(0.0)])
def test_every_stage_and_plan_trains_alike(on_ranks, clip_grad):
    runs = [on_ranks(2, "trained", stage=stage, clip_grad=clip_grad, **how) for stage, how in RUNS.items()]
    wanted = runs[0][0]
    assert wanted["losses"] == sorted(wanted["losses"], reverse=True)
    for stage, ranks in enumerate(runs):
        for result in ranks:
            assert result["losses"] == ranks[0]["losses"] == pytest.approx(wanted["losses"], rel=2e-5)
            assert result["norms"] == ranks[0]["norms"] == pytest.approx(wanted["norms"], rel=2e-4)
            for name, weight in wanted["weights"].items():
                moved = (weight - wanted["start"][name]).norm()
                assert (result["weights"][name] - weight).norm() <= 1e-3 * moved, name
            # ZeRO 3 reduces in the passes.
            assert result["spans"] == [*result["passes"], *([("G", -1)] if stage < 3 else []), ("U", -1)]
            assert result["marks"][0].startswith(("forward of", "backward of"))
            assert result["marks"][-1] == "update"


def test_labels_that_do_not_fit_are_refused_before_an_update(on_ranks):
    on_ranks(2, "refused_labels")


def test_what_the_engine_cannot_run_is_refused_on_every_rank(on_ranks):
    wanted = {"ranks": "4 ranks", "stages": "2 stages", "shared": "names no cp_comm", "dropout": "act_fn drops 0.1"}
    for said in on_ranks(2, "refused"):
        assert {name: part for name, part in wanted.items() if part not in said[name]} == {}, said
