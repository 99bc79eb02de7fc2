"""Scripts started as users start them: by torchrun or ``accelerate launch``, and with ``evenload run`` around it.

The forge of `test_equal.py` leaves launchers and imports out; here they are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

launching = sys.modules["launching"]
pytestmark = pytest.mark.slow


def test_accelerate_launch_and_the_environment_give_one_run(assets: Path, tmp_path: Path) -> None:
    script = launching.SCRIPTS / "accelerate_script.py"
    words = ["--model", assets / "models" / "llama", "--data", assets / "data" / "text", "--max-steps", 4]
    launched = launching.launch(script, words, tmp_path / "launched", started_by="accelerate")
    assert launched.code == 0, launched.output[-3000:]
    variables = launching.accelerate_environment("fsdp", tmp_path)
    fsdp = launching.launch(script, words, tmp_path / "fsdp", variables=variables)
    assert fsdp.code == 0, fsdp.output[-3000:]
    assert list(launched.logged("loss")) == [1, 2, 3, 4]
    for name in ("loss", "grad_norm"):
        assert launching.largest_difference(launched.logged(name), fsdp.logged(name)) < 1e-5
