"""What evenload cannot plan trains as it would, with what to change in a run's last line; --require ends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import launching
import pytest
from harness.cases import only_full
from launching import RECIPE

pytestmark = pytest.mark.slow


class Case(NamedTuple):
    """A script that is not planned, and what its user is to read."""

    script: str
    message: str
    do: str
    code: int
    model: str = "llama"
    data: str = "text"

    def __str__(self) -> str:
        return f"{self.script} {self.model}"


UNPLANNED = "packed causal attention cannot run the model 'qwen3_moe'"
ROUTER = Case("trainer_script.py", UNPLANNED, "the script runs as it is", 0, "qwen3_moe")
NOISE = Case("dpo_script.py", "NEFTune's noise depends", "leave neftune_noise_alpha out", 0, data="preferences")
LOOP = Case("accelerate_script.py", "in a loop of Accelerate", "give a Hugging Face causal language model", 0, "gpt2")
NO_STEP = Case("no_step_script.py", "no loop that evenload knows reached a step", "train by transformers.Trainer", 0)


def arguments(case: Case, assets: Path, folder: Path) -> list[object]:
    """What the user types behind the script."""
    trl = case.script == "dpo_script.py"
    model, data = ("--model_name_or_path", "--dataset_name") if trl else ("--model", "--data")
    words: list[object] = [model, assets / "models" / case.model, data, assets / "data" / case.data]
    if case.script == "accelerate_script.py":
        return [*words, "--max-steps", 2]
    precision = ["--bf16", "False"] if trl else []
    precision += ["--neftune_noise_alpha", 5] if case is NOISE else []
    return [*words, *launching.COMMON, "--output_dir", folder / "out", "--max_steps", 2, *precision]


def test_where_plans_are_required_every_rank_ends_before_the_first_step(
    forged_run: Callable[..., Any], assets: Path, tmp_path: Path
) -> None:
    required = {"PYTHON_EVENLOAD_REQUIRE": "1"}
    ended = forged_run(NOISE.script, arguments(NOISE, assets, tmp_path), RECIPE, required)
    assert ended.code == 1, ended.output[-3000:]
    assert "grad_norm" not in ended.output
    # A forge's ranks end with the traceback, where those of a launcher print the message alone.
    said = "Error: nothing is planned in Transformers' Trainer, and --require asks"
    assert ended.output.count(said) == launching.RANKS
    assert NOISE.message in ended.output
    assert NOISE.do in ended.output


@pytest.mark.parametrize("case", [ROUTER, NOISE], ids=str)
def test_a_script_that_nothing_is_exact_for_stays_as_it_is_and_says_so(
    case: Case, forged_run: Callable[..., Any], assets: Path, tmp_path: Path
) -> None:
    words = arguments(case, assets, tmp_path)
    stock, ended = (forged_run(case.script, words, recipe) for recipe in ("", RECIPE))
    assert (stock.code, ended.code) == (0, 0), ended.output[-3000:]
    assert case.message in ended.output
    assert case.do in ended.output
    figures = [[line for line in run.output.splitlines() if "grad_norm" in line] for run in (stock, ended)]
    assert figures[0] == figures[1] != []


@pytest.mark.parametrize("case", [ROUTER._replace(model="llama"), only_full(LOOP._replace(model="llama"))], ids=str)
def test_a_rank_without_evenload_is_named_and_not_waited_for(
    case: Case, forged_run: Callable[..., Any], assets: Path, tmp_path: Path
) -> None:
    words, waits = arguments(case, assets, tmp_path), {"HOSTS_WAIT_S": "1"}
    ended = forged_run(case.script, words, RECIPE, waits, one_sided=True)
    assert ended.code == 1, ended.output[-3000:]
    assert ended.output.count("RankError: rank 1 of 2 runs without evenload") == 1, ended.output[-3000:]
    assert "where one launcher starts all nodes, let it carry PYTHONPATH and PYTHON_EVENLOAD" in ended.output


@pytest.mark.parametrize(("case", "started_by"), [only_full(LOOP, "torchrun"), only_full(NO_STEP, "python")], ids=str)
def test_the_command_says_it_once_and_in_its_last_line(
    case: Case, started_by: str, assets: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    words, script = arguments(case, assets, tmp_path), launching.SCRIPTS / case.script
    ended = launching.launch(script, words, tmp_path / "run", recipe, started_by)
    assert ended.code == case.code, ended.output[-3000:]
    assert "EvenloadError" not in ended.output
    said = [line for line in ended.output.splitlines() if line.startswith("evenload: ")]
    assert said == [ended.output.rstrip().splitlines()[-1]], "a warning is given in the last line alone"
    assert said[0].startswith("evenload: warning: nothing was planned: ")
    assert case.message in said[0]
    assert case.do in said[0]
    assert ("grad_norm" in ended.output) == (case is not NO_STEP)
