"""A tenant that misbehaves under DeepSpeed is named and left as it is; no bit of the others depends on it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

CASES = [
    pytest.param(0, {}, ["chains some", "random 2"], id="zero 0"),
    pytest.param(3, {"recompute": True}, ["chains some", "random 2"], id="zero 3"),
    pytest.param(1, {"pp": 2}, ["1", "2 W"], id="stages"),
]
FAULTS = {"weights": "not finite: loss, gradient", "rate": "not finite: learning rate"}


@pytest.mark.parametrize(("stage", "more", "names"), CASES)
def test_a_tenant_that_misbehaves_is_named_and_changes_nobody(on_ranks, stage, more, names):
    behaving = on_ranks(2, "rank_isolation.beside", how="", stage=stage, names=names, **more)
    for how, said in FAULTS.items():
        results = on_ranks(2, "rank_isolation.beside", how=how, stage=stage, names=names, **more)
        for good, bad in zip(behaving, results, strict=True):
            assert not any(good["failed"])
            assert good["steps"] == len(names)
            assert bad["failed"] == [{1: said}] * len(names)
            assert bad["steps"] == 0
            assert bad["losses"] == good["losses"]
            assert bad["bits"] == good["bits"]
