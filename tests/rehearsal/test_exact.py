"""The trainers' float64 proofs on a rehearsed GPU, whose side streams run as late as they may.

A wait that is missing, memory that is used again too early, a buffer that the host writes to before its copy is done:
each is a wrong number here.
"""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import module_at

pytestmark = pytest.mark.slow

TWO = {"model__num_layers": 2}


@pytest.mark.parametrize(("size", "layout"), [(2, TWO), (2, {"parallel__pp": 2})], ids=["dp2", "pp2"])
def test_slices(jobs: Any, size: int, layout: dict[str, Any]) -> None:
    tests = module_at("integrations/megatron/test_slices.py")
    tests._exact(jobs("megatron")(size, "sliced", seeds=[0, 1, 2, 3], **layout), layout)


def test_micro_batches_that_ranks_share(jobs: Any) -> None:
    tests = module_at("integrations/megatron/test_shared.py")
    plans = [*tests.BY_HAND, 0, 1]
    tests._exact(jobs("megatron")(4, "shared", plans=plans, **TWO), {})


def test_experts_that_have_copies(jobs: Any) -> None:
    tests = module_at("integrations/megatron/test_experts.py")
    for plugins in (tests.PACKS, tests.SLICES | tests.CUT):
        tests.exact(
            jobs("megatron")(2, "routed", moe=tests.BIASED, plugins=plugins, parallel__ep=2),
            branch="cut sequences" if "max_tokens" in str(plugins) and plugins is not tests.PACKS else "",
        )


def test_activations_that_wait_in_host_memory(jobs: Any) -> None:
    names = ["offloaded", "mixed ring"]
    for result in jobs("deepspeed")(4, "rank_shared.exactness", stage=2, names=names, recompute=False):
        for name in names:
            assert result[name]["grad"] <= 2e-6
            assert result[name]["loss"] <= 2e-6
