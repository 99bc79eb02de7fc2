"""The trainers' float64 proofs on a rehearsed GPU, whose side streams run as late as they may.

A wait that is missing, memory that is used again too early, a buffer that the host writes to before its copy is done:
each is a wrong number here.
"""

import pytest

from .conftest import TESTS, module_at, said_by

pytestmark = [pytest.mark.slow, pytest.mark.cuda]

TWO = {"model__num_layers": 2}
PROGRAM = """
from rehearsal import packages
packages.install(**packages.VERSIONS)
import pytest
sys.exit(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "-n", "0", "-m", "gpu", sys.argv[1]]))
"""


@pytest.mark.parametrize(("size", "layout"), [(2, TWO), (2, {"parallel__pp": 2})], ids=["dp2", "pp2"])
def test_slices(on_ranks, size, layout):
    tests = module_at("integrations/megatron/test_slices.py")
    tests._exact(on_ranks(size, "proven", plans=[0, 1, 2, 3], lengths=tests.LENGTHS, **layout), layout)


def test_micro_batches_that_ranks_share(on_ranks):
    tests = module_at("integrations/megatron/test_shared.py")
    plans = [*tests.BY_HAND, *tests.DRAWN[:2]]
    tests.exact(on_ranks(4, "proven", plans=plans, **TWO), {})


def test_experts_that_have_copies(on_ranks):
    tests = module_at("integrations/megatron/test_experts.py")
    for plugins in (tests.PACKS, tests.SLICES | tests.CUT):
        tests.exact(
            on_ranks(2, "routed", moe=tests.BIASED, plugins=plugins, parallel__ep=2),
            branch="cut sequences" if "max_tokens" in str(plugins) and plugins is not tests.PACKS else "",
        )


def test_tokens_that_go_once_to_a_node(on_ranks):
    """Drawn copies, and copies that pay inside a node and are fetched again, in passes that run twice."""
    tests = module_at("integrations/megatron/test_experts.py")
    local = {"moe": tests.LOSSES, "local": True, "train__recompute": True}
    for changes in ({"moe": tests.BIASED}, local):
        routed = {"plugins": tests.SLICES, "seeds": (None,) * 4, "parallel__ep": 4, "once": True, **changes}
        tests.exact(on_ranks(4, "routed", **routed), branch="cut sequences")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", ["stage", "attention"])
def test_what_is_marked_for_a_gpu(folder):
    """Offload through page-locked memory to the last bit, kernels of CUDA beside their reference: each in a stream."""
    said = said_by(PROGRAM, str(TESTS / "runtime" / folder), limit_s=850)
    assert " passed" in said
    skipped = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    assert all("torch_cpu is not there" in line for line in skipped), "every other row has its kernel"
