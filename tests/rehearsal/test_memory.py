"""The books of a rehearsed GPU's memory, and what `evenload profile` makes of them."""

import pytest
import yaml

from .conftest import said_by
from .test_recipes import RECIPES, SMALL

pytestmark = pytest.mark.slow

PROGRAM = """
import torch
MIB = 1 << 20
cuda = torch.cuda
at_first = cuda.memory_allocated()
x = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
host = torch.zeros(5 * MIB, dtype=torch.uint8)
view = x[:10]
assert cuda.memory_allocated() - at_first == 3 * MIB, "a view takes nothing, nor does the host"
assert cuda.memory_reserved() % MIB == 0
del x
assert cuda.memory_allocated() - at_first == 3 * MIB, "a view keeps its storage"
cuda.reset_peak_memory_stats()
y = view.float() + 1
del view, y
assert cuda.memory_allocated() == at_first
assert cuda.max_memory_allocated() - at_first >= 3 * MIB
weight = torch.ones(2 * MIB, device="cuda", requires_grad=True)
cuda.reset_peak_memory_stats()
(weight * 2).square().sum().backward()
assert cuda.memory_allocated() - at_first == 2 * 8 * MIB, "the weight and its gradient are left"
assert cuda.max_memory_allocated() - at_first >= 4 * 8 * MIB, "what autograd keeps is counted"
assert cuda.mem_get_info()[0] + cuda.memory_reserved() == cuda.mem_get_info()[1]
print("DONE", flush=True)
os._exit(0)
"""


def test_storages_of_the_device_are_in_its_books_while_something_holds_them():
    assert "DONE" in said_by(PROGRAM)


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", ["slices", "deepspeed"])
def test_a_profile_predicts_what_the_allocator_holds(recipe, rehearse, tmp_path):
    costs = tmp_path / "costs.yaml"
    words = ("profile", str(RECIPES / f"{recipe}.yaml"), *SMALL, "--out", str(costs))
    rehearse("deepspeed" if recipe == "deepspeed" else "megatron", words)
    assert yaml.safe_load(costs.read_text())["memory"]["fit_error"] < 0.05
