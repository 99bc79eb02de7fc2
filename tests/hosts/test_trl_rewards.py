"""`evenload.cascade` as a reward of TRL's own Trainer on two ranks: what goes on is scored as where it came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_rewards_that_all_go_on_are_those_of_the_dear_scorer(
    task: str, forged_run: Callable[..., Any], assets: Path, tmp_path: Path
) -> None:
    words = [task, *launching.COMMON, *launching.trainer_arguments("ddp", tmp_path), "--num_generations", "2"]
    words += ["--max_completion_length", "128", "--beta", "0.0", "--bf16", "False", "--max_steps", "2"]
    words += ["--model_name_or_path", assets / "models" / "llama", "--dataset_name", assets / "data" / "preferences"]
    done = forged_run("trl_script.py", [*words, "--output_dir", tmp_path / "out"], "", {"HOSTS_CASCADE": "1"})
    assert done.code == 0, done.output[-4000:]
    for name in ("mean", "std"):
        got = done.logged(f"rewards/cascade/{name}")
        assert got == done.logged(f"rewards/many_unlike_words/{name}")
        assert len(got) == 2
        assert min(got.values()) > 0
    assert set(done.logged("cascade/share_of_scorer_2").values()) == {1.0}
    assert done.logged("cascade/score") == done.logged("cascade/score_uncorrected")
    assert done.logged("cascade/score") == pytest.approx(done.logged("rewards/cascade/mean"))
