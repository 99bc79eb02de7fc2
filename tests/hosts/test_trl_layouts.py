"""TRL's Trainers in every layout, stock and with evenload: losses and gradient norms of two steps are equal, and rows
change places or stay where they are without padding, with what they begin with computed once or in each of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import launching
import pytest
from harness.cases import only_full
from launching import RECIPE

pytestmark = pytest.mark.slow

GENERATED = "--num_generations 2 --max_completion_length 128 --beta 0.0 --learning_rate 1e-3"
SEQUENTIAL = "--train_sampling_strategy sequential"
TASKS = {"dpo": "", "kto": SEQUENTIAL, "reward": "", "grpo": GENERATED, "rloo": GENERATED}
IN_PLACE = ("kto",)
"""Its KL is the mean of a micro-batch."""
LORA = "--use_peft --lora_r 4 --lora_dropout 0 --lora_target_modules q_proj v_proj --lora_task_type"
LAYOUTS = (*launching.LAYOUTS, "lora")
"""The last one under DDP."""
ROWS_ALONE = RECIPE.replace("max_tokens", "trees: false, max_tokens")
FLOAT32 = 2e-6
OF_SUMS = 5e-4
"""RLOO's ratios are of whole answers' log-probabilities, sums of hundreds in float32, which are scored in other packs
than they are trained in; so is its loss, which centred advantages leave no other value. In float64: test_units."""
AT_EVERY_CHANGE = ("rloo", "fsdp")
"""Whose last forward leaves weights whole: ranks once ended by that."""
OTHERS = [case for case in product(TASKS, LAYOUTS) if case != AT_EVERY_CHANGE]


@pytest.fixture(scope="module")
def single_answers(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pairs of preferences, as two rows next to each other."""
    folder = tmp_path_factory.mktemp("single_answers")
    rows = map(json.loads, (assets / "data" / "preferences" / "train.jsonl").read_text().splitlines())
    singles = [
        json.dumps({"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"})
        for row, key in product(rows, ("chosen", "rejected"))
    ]
    (folder / "train.jsonl").write_text("\n".join(singles))
    return folder


@pytest.mark.parametrize(("task", "layout"), [AT_EVERY_CHANGE, *(only_full(*other) for other in OTHERS)])
def test_a_trainer_of_trl_trains_the_same_in_a_layout(
    task: str, layout: str, forged_run: Callable[..., Any], assets: Path, single_answers: Path, tmp_path: Path
) -> None:
    data = single_answers if task == "kto" else assets / "data" / "preferences"
    words = [task, *launching.COMMON, *launching.trainer_arguments(layout, tmp_path), *TASKS[task].split()]
    words += ["--model_name_or_path", assets / "models" / "llama", "--dataset_name", data]
    words += ["--bf16", "False", "--max_steps", "2", "--gradient_accumulation_steps", "2"]
    words += [*LORA.split(), "SEQ_CLS" if task == "reward" else "CAUSAL_LM"] if layout == "lora" else []
    runs, tokens = [], []
    for name, recipe in (("stock", ""), ("trees", RECIPE), ("rows", ROWS_ALONE)):
        (measured := tmp_path / name).mkdir()
        out = ["--output_dir", tmp_path / f"{name}_out"]
        runs.append(forged_run("trl_script.py", [*words, *out], recipe, {"HOSTS_MEASURED": str(measured)}))
        assert runs[-1].code == 0, runs[-1].output[-4000:]
        steps = [json.loads(path.read_text())["computed"] for path in measured.iterdir()]
        tokens.append(sum(last - first for first, last in steps))
    stock, *planned = runs
    _, trees, rows = tokens
    assert trees < rows, tokens
    for own in planned:
        in_place, planned_rows = "their padding is not computed" in own.output, "step 2: " in own.output
        assert (in_place, planned_rows) == (task in IN_PLACE, task not in IN_PLACE), own.output[-4000:]
        for name in ("loss", "grad_norm"):
            wanted, got = stock.logged(name), own.logged(name)
            assert wanted.keys() == got.keys()
            assert wanted or name == "grad_norm"  # ZeRO 0 logs no norm
            for step, value in wanted.items():
                most = OF_SUMS * max(abs(value), 1.0) if task == "rloo" else FLOAT32 * abs(value)
                assert abs(got[step] - value) <= most, (name, step, wanted, got)
