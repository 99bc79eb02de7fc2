"""Tenants on real DeepSpeed engines: each as if it were alone with the base, under every stage of ZeRO."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROUNDING = 2e-6
HAND = ("chains none", "chains some", "regrouped")
EQUAL = ("chains none equal", "chains some equal", "chains all equal", "regrouped")
RANDOM = tuple(f"random {seed}" for seed in range(12))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "recompute", "names"),
    [
        (0, False, (*HAND, *RANDOM[:4])),
        (1, True, (*HAND, *RANDOM[4:8])),
        (2, False, RANDOM[8:]),
        (3, False, (*EQUAL, *RANDOM[:3])),
        (3, True, (*EQUAL, *RANDOM[3:6])),
    ],
)
def test_gradients_are_those_of_each_tenant_alone(on_ranks, stage, recompute, names):
    results = on_ranks(2, "rank_tenants.exactness", stage=stage, names=list(names), recompute=recompute)
    for name in names:
        for result in results:
            assert result[name]["tenants"] >= 2, name
            assert max(result[name][error] for error in ("loss", "grad", "norm")) <= ROUNDING, name
            assert result[name]["gathered"] == 0, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "more", "names"),
    [
        (0, {}, ("chains some", "random 2", "random 1")),
        (2, {"recompute": True}, ("chains some", "random 2", "random 1")),
        (3, {"recompute": True}, ("chains some", "random 2", "random 1")),
        (1, {"pp": 2}, ("1", "2 W", "3 recompute")),
    ],
)
def test_adapters_after_three_steps_are_those_of_each_tenant_alone(on_ranks, stage, more, names):
    for told in on_ranks(2, "rank_tenants.trained", stage=stage, names=list(names), **more):
        assert told["absent"] == [True, True]
        assert told["base"]
        assert told["steps"] == [3, 2, 3]
        assert max(told[error] for error in ("loss", "norm", "score", "logits")) <= ROUNDING
        assert max(told["apart"]) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "recompute"), [(1, False), (3, True)])
def test_ranks_share_micro_batches_of_tenants(on_ranks, stage, recompute):
    names = ["mixed ring equal", "cp_groups all_to_all", "chains some", "random 3"]
    for result in on_ranks(4, "rank_tenants.exactness", stage=stage, names=names, recompute=recompute):
        for name in names:
            assert max(result[name][error] for error in ("loss", "grad", "norm")) <= ROUNDING, name
            assert result[name]["gathered"] == 0, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "recompute", "names"),
    [
        (2, False, ("whole", *(str(seed) for seed in range(4)), "5 W")),
        (2, True, ("whole", "4", "6 recompute")),
        (4, False, ("whole", "1", "2 idle", "3 shared", "4 shared", "7 W")),
    ],
)
def test_pipelines_train_each_tenant_as_if_alone(on_ranks, size, recompute, names):
    results = on_ranks(size, "rank_tenants.exactness", stage=1, names=list(names), pp=2, recompute=recompute)
    for name in names:
        for result in results:
            assert result[name]["tenants"] == 3, name
            assert max(result[name][error] for error in ("loss", "grad", "norm")) <= ROUNDING, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"trainer": "megatron", "parallel": {"tp": 2}}, {"trainer": "deepspeed", "deepspeed": {"zero_stage": 3}}),
        ({"trainer": "deepspeed", "parallel": {"pp": 2}}, {"trainer": "megatron"}),
    ],
)
def test_a_tenant_goes_on_under_the_other_trainer(world, forge, tmp_path, first, then):
    spec = importlib.util.spec_from_file_location("other_trainer", Path(__file__).with_name("rank_other_trainer.py"))
    ranks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ranks)
    ranks.wrote_folder(tmp_path / "base")
    losses = []
    for asked in (
        {**first, "steps": 4, "write": str(tmp_path / "half")},
        {**then, "steps": 2, "read": str(tmp_path / "half")},
    ):
        folder = tmp_path / asked["trainer"]
        folder.mkdir()
        of_trainer = type(world(2))(forge(asked["trainer"]), 2, folder)
        losses.append(of_trainer.run(ranks.call, {"folder": str(tmp_path / "base"), **asked})[0])
        of_trainer.close()
    whole, resumed = losses
    assert resumed == [pytest.approx(of_step, rel=ROUNDING) for of_step in whole[2:]]
