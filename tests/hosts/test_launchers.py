"""Scripts started as users start them, with ``evenload run`` around torchrun and ``accelerate launch``.

The forge of `test_equal.py` leaves launchers and imports out; here they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

launching = sys.modules["launching"]
pytestmark = pytest.mark.slow

RECIPE = "trainer: transformers\nplugins:\n  packing: {enabled: true, max_tokens: 1024}\n"


@pytest.mark.parametrize(("started_by", "layout"), [("torchrun", "zero2"), ("accelerate", "fsdp")])
def test_a_launched_run_is_that_of_the_forge(
    started_by: str, layout: str, forged_run: Callable[..., Any], assets: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = [*launching.COMMON, "--model", assets / "models" / "llama", "--data", assets / "data" / "text"]
    words += ["--output_dir", tmp_path / "out", "--max_steps", 5, *launching.trainer_arguments(layout, tmp_path)]
    script = launching.SCRIPTS / "trainer_script.py"
    launched = launching.launch(script, words, tmp_path / "run", tmp_path / "recipe.yaml", started_by)
    assert launched.code == 0, launched.output[-3000:]
    assert launched.output.rstrip().endswith("evenload: planned 5 steps of Transformers' Trainer with packing")
    stock = forged_run(script.name, words)
    assert list(stock.logged("loss")) == [1, 2, 3, 4, 5]
    for name in ("loss", "grad_norm"):
        assert launching.largest_difference(stock.logged(name), launched.logged(name)) < 1e-5
