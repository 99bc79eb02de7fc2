"""The trainers' float64 proofs on a rehearsed GPU, whose side streams run as late as they may.

A wait that is missing, memory that is used again too early, a buffer that the host writes to before its copy is done:
each is a wrong number here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from .conftest import TESTS, module_at

pytestmark = [pytest.mark.slow, pytest.mark.cuda]

TWO = {"model__num_layers": 2}
PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import rehearsal
rehearsal.install()
from rehearsal import packages
packages.install(**packages.VERSIONS)
import pytest
sys.exit(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "-n", "0", "-m", "gpu", sys.argv[1]]))
"""


@pytest.mark.parametrize(("size", "layout"), [(2, TWO), (2, {"parallel__pp": 2})], ids=["dp2", "pp2"])
def test_slices(jobs: Any, size: int, layout: dict[str, Any]) -> None:
    tests = module_at("integrations/megatron/test_slices.py")
    tests._exact(jobs("megatron")(size, "proven", plans=[0, 1, 2, 3], lengths=tests.LENGTHS, **layout), layout)


def test_micro_batches_that_ranks_share(jobs: Any) -> None:
    tests = module_at("integrations/megatron/test_shared.py")
    plans = [*tests.BY_HAND, *tests.DRAWN[:2]]
    tests.exact(jobs("megatron")(4, "proven", plans=plans, **TWO), {})


def test_experts_that_have_copies(jobs: Any) -> None:
    tests = module_at("integrations/megatron/test_experts.py")
    for plugins in (tests.PACKS, tests.SLICES | tests.CUT):
        tests.exact(
            jobs("megatron")(2, "routed", moe=tests.BIASED, plugins=plugins, parallel__ep=2),
            branch="cut sequences" if "max_tokens" in str(plugins) and plugins is not tests.PACKS else "",
        )


def test_tokens_that_go_once_to_a_node(jobs: Any) -> None:
    """Drawn copies, and copies that pay inside a node and are fetched again, in passes that run twice."""
    tests = module_at("integrations/megatron/test_experts.py")
    local = {"moe": tests.LOSSES, "local": True, "train__recompute": True}
    for changes in ({"moe": tests.BIASED}, local):
        routed = {"plugins": tests.SLICES, "seeds": (None,) * 4, "parallel__ep": 4, "once": True, **changes}
        tests.exact(jobs("megatron")(4, "routed", **routed), branch="cut sequences")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", ["stage", "attention"])
def test_what_is_marked_for_a_gpu(folder: str) -> None:
    """Offload through page-locked memory to the last bit, kernels of CUDA beside their reference: each in a stream."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", PROGRAM.format(tests=str(TESTS)), str(TESTS / "runtime" / folder)]
    done = subprocess.run(
        command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("torch_cpu is not there" in line for line in skipped), "every other row has its kernel"
