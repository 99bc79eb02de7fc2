"""A tenant that misbehaves under DeepSpeed is named and left as it is; no bit of the others depends on it."""

from __future__ import annotations

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow

CASES = [
    only_full({"stage": 0}, ["slices, half replayed", "8"], id="zero 0"),
    pytest.param({"stage": 3, "recompute": True}, ["packs", "5"], id="zero 3"),
    pytest.param({"stage": 1, "pp": 2}, ["packs", "pipeline 3"], id="stages"),
]
FAULTS = {"weights": "not finite: loss, gradient", "rate": "not finite: learning rate"}


@pytest.mark.parametrize(("asked", "names"), CASES)
def test_a_tenant_that_misbehaves_is_named_and_changes_nobody(on_ranks, asked, names):
    for runs in on_ranks(2, "tenant_jobs.beside", names=names, **asked):
        good = runs[""]
        assert not any(good["failed"])
        assert good["steps"] == len(names)
        for how, said in FAULTS.items():
            assert runs[how]["failed"] == [{1: said}] * len(names)
            assert runs[how]["steps"] == 0
            assert runs[how]["losses"] == good["losses"]
            assert runs[how]["bits"] == good["bits"]
