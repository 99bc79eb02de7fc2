"""The example of policy gradients: it runs on two ranks, and learns the same under any plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import evenload
import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow
SCRIPT = Path(evenload.__file__).parent / "examples" / "rollout" / "policy_gradient.py"


@pytest.mark.parametrize("steps", [2, only_full(8)])
def test_it_learns_the_same_from_rewards_under_any_plan(
    steps: int, tmp_path: Path, scripted: Callable[..., Any]
) -> None:
    said = []
    for words in (["plugins.packing.max_tokens=256"], ["plugins.packing.enabled=false"]):
        done = scripted("megatron", tmp_path, SCRIPT, steps, "train.dtype=fp64", *words, ranks=2)
        assert done.returncode == 0, done.stderr[-3000:]
        said.append(done.stdout.splitlines())
    first, last = (float(line.rpartition(" ")[2]) for line in said[0])
    assert 0 < first < last < 1
    assert said[0] == said[1]
