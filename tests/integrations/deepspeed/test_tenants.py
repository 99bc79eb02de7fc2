"""Tenants on real DeepSpeed engines: each as if it were alone with the base, under every stage of ZeRO."""

from __future__ import annotations

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
@pytest.mark.parametrize(("stage", "recompute"), [(0, False), (2, True), (3, True)])
def test_adapters_after_three_steps_are_those_of_each_tenant_alone(on_ranks, stage, recompute):
    names = ["chains some", "random 2", "random 1"]
    for told in on_ranks(2, "rank_tenants.trained", stage=stage, names=names, recompute=recompute):
        assert told["absent"] == [True, True]
        assert told["base"]
        assert told["steps"] == [3, 2, 3]
        assert max(told[error] for error in ("loss", "norm", "score", "logits")) <= ROUNDING
        assert max(told["apart"]) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "recompute"), [(1, False), (3, True)])
def test_ranks_share_micro_batches_of_tenants(on_ranks, stage, recompute):
    names = ["mixed ring equal", "cp_groups all_to_all", "chains some", "random 3"]
    for result in on_ranks(4, "rank_tenants.shared_exactness", stage=stage, names=names, recompute=recompute):
        for name in names:
            assert max(result[name][error] for error in ("loss", "grad", "norm")) <= ROUNDING, name
            assert result[name]["gathered"] == 0, name
