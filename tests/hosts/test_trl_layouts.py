"""TRL's Trainers in every layout, stock and with evenload: losses and gradient norms of two steps are equal, and rows
change places or stay where they are without padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import pytest
from harness.cases import only_full
from launching import RECIPE

pytestmark = pytest.mark.slow

GENERATED = "--num_generations 2 --max_completion_length 128 --beta 0.0 --learning_rate 1e-3"
TASKS = {"dpo": "", "kto": "", "reward": "", "grpo": GENERATED, "rloo": GENERATED}
IN_PLACE = ("kto",)
"""Its KL is the mean of a micro-batch."""
FLOAT32 = 2e-6
OF_SUMS = 5e-4
"""RLOO's ratios are of whole answers' log-probabilities, sums of hundreds in float32, which are scored in other packs
than they are trained in; so is its loss, which centred advantages leave no other value. In float64: test_units."""
AT_EVERY_CHANGE = ("rloo", "fsdp")
"""Whose last forward leaves weights whole: ranks once ended by that."""
OTHERS = [(task, layout) for layout in launching.LAYOUTS for task in TASKS if (task, layout) != AT_EVERY_CHANGE]


@pytest.mark.parametrize(("task", "layout"), [AT_EVERY_CHANGE, *(only_full(*other) for other in OTHERS)])
def test_a_trainer_of_trl_trains_the_same_in_a_layout(
    task: str, layout: str, forged_run: Callable[..., Any], assets: Path, tmp_path: Path
) -> None:
    words = [task, *launching.COMMON, *launching.trainer_arguments(layout, tmp_path), *TASKS[task].split()]
    words += ["--model_name_or_path", assets / "models" / "llama", "--dataset_name", assets / "data" / "preferences"]
    words += ["--bf16", "False", "--max_steps", "2", "--gradient_accumulation_steps", "2"]
    words += ["--output_dir", tmp_path / "out"]
    stock, own = (forged_run("trl_script.py", words, recipe) for recipe in ("", RECIPE))
    assert (stock.code, own.code) == (0, 0), (stock.output[-4000:], own.output[-4000:])
    in_place, planned = "their padding is not computed" in own.output, "step 2: 8 samples in" in own.output
    assert (in_place, planned) == (task in IN_PLACE, task not in IN_PLACE), own.output[-4000:]
    for name in ("loss", "grad_norm"):
        wanted, got = stock.logged(name), own.logged(name)
        assert wanted.keys() == got.keys()
        assert wanted or name == "grad_norm"  # ZeRO 0 logs no norm
        for step, value in wanted.items():
            most = OF_SUMS * max(abs(value), 1.0) if task == "rloo" else FLOAT32 * abs(value)
            assert abs(got[step] - value) <= most, (name, step, wanted, got)
