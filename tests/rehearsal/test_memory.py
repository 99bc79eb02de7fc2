"""The books of a rehearsed GPU's memory, and what `evenload profile` makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import TESTS
from .seen import seen_in
from .test_recipes import RECIPES, SMALL

pytestmark = pytest.mark.slow

PROGRAM = """
import os, sys
sys.path.insert(0, {tests!r})
os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
import rehearsal
rehearsal.install()
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


def test_storages_of_the_device_are_in_its_books_while_something_holds_them() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM.format(tests=str(TESTS))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "DONE" in done.stdout, done.stderr[-3000:]


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", ["slices", "deepspeed"])
def test_a_profile_predicts_what_the_allocator_holds(recipe: str, forge: Any, tmp_path: Path) -> None:
    trainer, costs = "deepspeed" if recipe == "deepspeed" else "megatron", tmp_path / "costs.yaml"
    words = ("profile", str(RECIPES / f"{recipe}.yaml"), *SMALL, "--out", str(costs))
    done = forge(f"cuda+{trainer}").run(tmp_path, words, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    seen_in(done.outputs).check()
    assert yaml.safe_load(costs.read_text())["memory"]["fit_error"] < 0.05
