"""What evenload cannot plan: one message before the first step with what to change, repeated in a run's last line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

launching = sys.modules["launching"]
pytestmark = pytest.mark.slow

RECIPE = "trainer: transformers\nplugins:\n  packing: {enabled: true, max_tokens: 1024}\n"


class Case(NamedTuple):
    """A script that is not planned, and what its user is to read."""

    script: str
    message: str
    do: str
    code: int
    model: str = "llama"
    data: str = "text"


ROUTER = Case(
    "trainer_script.py",
    "packed causal attention cannot run the model 'qwen3_moe'",
    "the script runs as it is",
    0,
    "qwen3_moe",
)
NOISE = Case("dpo_script.py", "NEFTune's noise depends", "leave neftune_noise_alpha out", 1, data="preferences")
LOOP = Case("accelerate_script.py", "in a loop of Accelerate", "give a Hugging Face causal language model", 0, "gpt2")
NO_STEP = Case("no_step_script.py", "no loop that evenload knows reached a step", "train by transformers.Trainer", 0)


def arguments(case: Case, assets: Path, folder: Path) -> list[object]:
    """What the user types behind the script."""
    trl = case.script == "dpo_script.py"
    model, data = ("--model_name_or_path", "--dataset_name") if trl else ("--model", "--data")
    words: list[object] = [model, assets / "models" / case.model, data, assets / "data" / case.data]
    if case is LOOP:
        return [*words, "--max-steps", 2]
    precision = ["--bf16", "False"] if trl else []
    precision += ["--neftune_noise_alpha", 5] if case is NOISE else []
    return [*words, *launching.COMMON, "--output_dir", folder / "out", "--max_steps", 2, *precision]


@pytest.mark.parametrize("case", [NOISE], ids=lambda case: f"{case.script} {case.model}")
def test_every_rank_refuses_before_the_first_step(
    case: Case, forged_run: Callable[..., Any], assets: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    ended = forged_run(case.script, arguments(case, assets, tmp_path), tmp_path / "recipe.yaml")
    assert ended.code == case.code, ended.output[-3000:]
    assert "grad_norm" not in ended.output
    # A forge's ranks end with the traceback, where those of a launcher print the message alone.
    assert ended.output.count(f"EvenloadError: {case.message}") == launching.RANKS
    assert case.do in ended.output


def test_a_script_that_nothing_is_exact_for_stays_as_it_is_and_says_so(
    forged_run: Callable[..., Any], assets: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = arguments(ROUTER, assets, tmp_path)
    stock, ended = (forged_run(ROUTER.script, words, recipe) for recipe in (None, tmp_path / "recipe.yaml"))
    assert (stock.code, ended.code) == (0, 0), ended.output[-3000:]
    assert ROUTER.message in ended.output
    assert ROUTER.do in ended.output
    figures = [[line for line in run.output.splitlines() if "grad_norm" in line] for run in (stock, ended)]
    assert figures[0] == figures[1] != []


@pytest.mark.parametrize("script", ["trainer_script.py", "accelerate_script.py"])
def test_a_rank_without_evenload_is_named_and_not_waited_for(
    script: str, forged_run: Callable[..., Any], assets: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    model, data = assets / "models" / "llama", assets / "data" / "text"
    words = {"trainer_script.py": arguments(ROUTER._replace(model="llama"), assets, tmp_path)}.get(
        script, ["--model", model, "--data", data, "--max-steps", 2]
    )
    ended = forged_run(script, words, tmp_path / "recipe.yaml", one_sided=True)
    assert ended.code == 1, ended.output[-3000:]
    assert ended.output.count("RankError: rank 1 of 2 runs without evenload") == 1, ended.output[-3000:]
    assert "where one launcher starts all nodes, let it carry PYTHONPATH and PYTHON_EVENLOAD" in ended.output


@pytest.mark.parametrize("case", [LOOP, NO_STEP], ids=lambda case: f"{case.script} {case.model}")
def test_the_command_says_it_once_and_in_its_last_line(case: Case, assets: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = arguments(case, assets, tmp_path)
    started_by = "python" if case is NO_STEP else "torchrun"
    script = launching.SCRIPTS / case.script
    ended = launching.launch(script, words, tmp_path / "run", tmp_path / "recipe.yaml", started_by)
    assert ended.code == case.code, ended.output[-3000:]
    assert "EvenloadError" not in ended.output
    assert ("exitcode  : 2" in ended.output) == (case.code == 1), "torchrun gives 1 for ranks that end with 2"
    *before, last = [line for line in ended.output.splitlines() if line.startswith("evenload: ")]
    assert ended.output.rstrip().endswith(last)
    assert last.startswith("evenload: warning: nothing was planned: ")
    assert case.message in last
    assert case.do in last
    assert len(before) == case.code, "a refusal is printed once by all ranks together, a warning in the last line alone"
    assert ("grad_norm" in ended.output) == (case is not NO_STEP)


def test_a_loss_that_raises_on_what_it_is_measured_by_ends_all_ranks_with_code_2(assets: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = arguments(ROUTER._replace(model="llama"), assets, tmp_path)
    script = launching.SCRIPTS / "raising_loss_script.py"
    ended = launching.launch(script, words, tmp_path / "run", tmp_path / "recipe.yaml")
    assert ended.code == 1, "torchrun gives 1 for ranks that end with 2"
    assert "exitcode  : 2" in ended.output, ended.output[-3000:]
    printed = [line for line in ended.output.splitlines() if "the script's loss raises on two short samples" in line]
    assert len(printed) == 2, "once by all ranks together, and in the last line of the command"
    assert "ValueError: batches of 16 tokens and more" in ended.output
    assert "grad_norm" not in ended.output
