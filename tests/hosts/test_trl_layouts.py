"""TRL's Trainers in every layout, stock and with evenload: losses and gradient norms of two steps are equal, and rows
change places or stay where they are without padding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

launching = sys.modules["launching"]
pytestmark = [pytest.mark.slow, pytest.mark.drawn]

RECIPE = "trainer: transformers\nplugins:\n  packing: {enabled: true, max_tokens: 1024}\n"
GENERATED = "--num_generations 2 --max_completion_length 128 --beta 0.0 --learning_rate 1e-3"
TASKS = {"dpo": "", "kto": "", "reward": "", "grpo": GENERATED, "rloo": GENERATED}
IN_PLACE = ("kto",)
"""Its KL is the mean of a micro-batch."""
FLOAT32 = 2e-6
OF_SUMS = 5e-4
"""RLOO's ratios are of whole answers' log-probabilities, sums of hundreds in float32, which are scored in other packs
than they are trained in; so is its loss, which centred advantages leave no other value. In float64: test_units."""
CASES = [(task, layout) for layout in launching.LAYOUTS for task in TASKS]


def drawn() -> list[tuple[str, str]]:
    """One of them; `make explore` has all."""
    explores = hypothesis.settings.get_current_profile_name() == "explore"
    return CASES if explores else [("rloo", "fsdp")]


def ran(launch: Callable[..., Any], case: tuple[str, str], assets: Path, folder: Path, recipe: Path | None) -> Any:
    task, layout = case
    folder.mkdir()
    words = [task, *launching.COMMON, *launching.trainer_arguments(layout, folder), *TASKS[task].split()]
    words += ["--model_name_or_path", assets / "models" / "llama", "--dataset_name", assets / "data" / "preferences"]
    words += ["--bf16", "False", "--max_steps", "2", "--gradient_accumulation_steps", "2", "--output_dir", folder]
    run = launch(launching.SCRIPTS / "trl_script.py", words, folder, recipe)
    assert run.code == 0, run.output[-4000:]
    return run


@pytest.mark.parametrize("case", drawn(), ids=str)
def test_a_trainer_of_trl_trains_the_same_in_a_layout(
    case: tuple[str, str], forged_launch: Callable[..., Any], assets: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    stock = ran(forged_launch, case, assets, tmp_path / "stock", None)
    own = ran(forged_launch, case, assets, tmp_path / "own", tmp_path / "recipe.yaml")
    in_place, planned = "their padding is not computed" in own.output, "step 2: 8 samples in" in own.output
    assert (in_place, planned) == (case[0] in IN_PLACE, case[0] not in IN_PLACE), own.output[-4000:]
    for name in ("loss", "grad_norm"):
        wanted, got = stock.logged(name), own.logged(name)
        assert wanted.keys() == got.keys()
        assert wanted or name == "grad_norm"  # ZeRO 0 logs no norm
        for step, value in wanted.items():
            most = OF_SUMS * max(abs(value), 1.0) if case[0] == "rloo" else FLOAT32 * abs(value)
            assert abs(got[step] - value) <= most, (name, step, wanted, got)
