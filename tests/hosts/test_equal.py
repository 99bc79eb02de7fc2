"""Scripts of users in every layout, stock and with evenload: the losses and gradient norms of every step are equal.

Ranks are started by a forge (see tests/README.md); `test_benchmarks.py` starts a script as users do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import launching
import pytest
from harness.cases import only_full
from launching import RECIPE

pytestmark = pytest.mark.slow

STEPS = 10
FLOAT32, NORM32, NORM64 = 1e-5, 5e-5, 1e-9
"""Largest relative difference of a loss in float32, of a norm in float32 and in float64. Adam's first steps divide by
the roots of tiny squares, which makes rounding larger in norms: in one step of twenty it reaches 1.1e-5."""
LOGGED = {"loss": FLOAT32, "eval_loss": FLOAT32, "num_tokens": 0.0, "grad_norm": NORM32}
"""TRL's accuracy and entropy are means over the passes of a step, whatever their tokens, so they are left out."""


class Case(NamedTuple):
    """A script in a layout; `arguments` are what its user adds."""

    script: str
    layout: str
    arguments: str = ""
    model: str = "llama"
    data: str = "text"

    def __str__(self) -> str:
        return " ".join(filter(None, (self.script.removesuffix("_script.py"), self.layout, self.model, self.arguments)))


EVERY_5 = "--eval_strategy steps --eval_steps 5"
TWICE = "--gradient_accumulation_steps 2"
CHECKPOINTING = "--gradient_checkpointing True"
LORA = "--use_peft --lora_r 4 --lora_dropout 0 --lora_target_modules q_proj v_proj"
FULL = "--bf16 False"
PEFT = "--lora_r 4"
TRAINER, SFT = "trainer_script.py", "trl_sft_script.py"
CASES = (
    Case(TRAINER, "zero3", f"{TWICE} {CHECKPOINTING} {EVERY_5}"),
    Case(SFT, "ddp", f"{FULL} {LORA}", data="chat"),
    Case(SFT, "fsdp", f"{FULL} {TWICE} {EVERY_5}", data="completions"),
)
OTHERS = (
    Case(TRAINER, "ddp", EVERY_5),
    Case(TRAINER, "ddp", TWICE, model="gpt2"),
    Case(TRAINER, "zero0", TWICE),
    Case(TRAINER, "zero1", TWICE),
    Case(TRAINER, "ddp", f"{PEFT} {TWICE}"),
    Case(TRAINER, "zero3", PEFT),
    Case(SFT, "ddp", f"{FULL} {TWICE}", data="completions"),
    Case(SFT, "zero2", f"{FULL} {EVERY_5}", data="completions"),
    Case(SFT, "fsdp", FULL, data="completions"),
)
RESUMED = (
    Case(TRAINER, "fsdp", f"{TWICE} {CHECKPOINTING} {EVERY_5}"),
    Case(TRAINER, "ddp", f"{TWICE} {CHECKPOINTING}"),
    Case(TRAINER, "zero2", f"{TWICE} {EVERY_5}"),
)
WRAPPED = {"ddp": "DistributedDataParallel", "fsdp": "FSDPLlamaForCausalLM"}
"""What a layout makes of a Llama; ZeRO makes a DeepSpeedEngine."""

Trained = Callable[..., Any]


@pytest.fixture
def trained(forged_run: Trained, assets: Path, tmp_path: Path) -> Trained:
    """``trained(case, *words, recipe="", steps=STEPS)``: the run of a case, which must have ended well."""

    def train(case: Case, *words: object, recipe: str = "", steps: int = STEPS) -> Any:
        names = ("--model_name_or_path", "--dataset_name") if "trl" in case.script else ("--model", "--data")
        given = [names[0], assets / "models" / case.model, names[1], assets / "data" / case.data]
        given += ["--output_dir", tmp_path / ("planned" if recipe else "stock"), "--max_steps", steps]
        layout = launching.trainer_arguments(case.layout, tmp_path)
        added = [*layout, *case.arguments.split(), *words]
        ended = forged_run(case.script, [*launching.COMMON, *given, *added], recipe)
        assert ended.code == 0, ended.output[-4000:]
        return ended

    return train


def compare(stock: Any, other: Any) -> None:
    for name, bar in LOGGED.items():
        difference = launching.largest_difference(stock.logged(name), other.logged(name))
        assert difference <= bar, f"{name} differs by {difference:.1e}"


def compared(case: Case, trained: Trained, *words: str) -> Any:
    """The stock run of a case, to which a planned one is equal."""
    stock = trained(case, *words)
    if case.script == TRAINER and PEFT not in case.arguments:
        assert f"trained a {WRAPPED.get(case.layout, 'DeepSpeedEngine')} on 2 ranks" in stock.output
    losses = stock.logged("loss")
    assert list(losses) == list(range(1, STEPS + 1))
    assert min(losses.values()) < losses[1]
    assert len(stock.logged("eval_loss")) == (STEPS // 5 if EVERY_5 in case.arguments else 0)
    compare(stock, trained(case, *words, recipe=RECIPE))
    return stock


@pytest.mark.parametrize("case", [*CASES, *map(only_full, OTHERS)], ids=str)
def test_every_step_is_equal(case: Case, trained: Trained) -> None:
    compared(case, trained)


def test_one_value_that_is_other_and_one_step_that_is_missing_are_noticed() -> None:
    rows = [{"step": step, **dict.fromkeys(LOGGED, 3.0)} for step in range(1, STEPS + 1)]
    compare(launching.Run(0, "", rows), launching.Run(0, "", rows))
    for name, bar in LOGGED.items():
        others = [row | ({name: 3.0 * (1 + 2 * bar + 1e-6)} if row["step"] == 4 else {}) for row in rows]
        for changed in (others, rows[:-1]):
            with pytest.raises(AssertionError):
                compare(launching.Run(0, "", rows), launching.Run(0, "", changed))


@pytest.mark.parametrize("case", [*RESUMED[:1], *map(only_full, RESUMED[1:])], ids=str)
def test_evenload_is_switched_off_and_on_in_the_middle_of_an_epoch_as_if_never_stopped(
    case: Case, trained: Trained, tmp_path: Path
) -> None:
    """A planned run's checkpoint goes on without evenload, and a stock run's with it."""
    saving = ("--save_strategy", "steps", "--save_steps", "7")
    whole = compared(case, trained, *saving)
    last = [whole.logged("loss")[step] for step in (8, 9, 10)]
    for wrote, recipe in (("planned", ""), ("stock", RECIPE)):
        checkpoint = tmp_path / wrote / "checkpoint-7"
        assert checkpoint.is_dir()
        resumed = trained(case, *saving, "--resume_from_checkpoint", checkpoint, recipe=recipe)
        assert resumed.history[-1]["train_loss"] == pytest.approx(sum(last) / 3, rel=1e-5), "it did not start at step 8"
        compare(whole, resumed)


def test_norms_are_equal_in_double_precision(trained: Trained) -> None:
    double = Case(TRAINER, "ddp", f"--dtype float64 {TWICE}")
    stock, norms = (trained(double, recipe=recipe, steps=2).logged("grad_norm") for recipe in ("", RECIPE))
    assert launching.largest_difference(stock, norms) <= NORM64


@pytest.mark.parametrize("layout", [only_full("ddp"), only_full("zero2"), "zero3", only_full("fsdp")])
def test_a_loop_of_accelerate_is_equal(layout: str, forged_run: Trained, assets: Path, tmp_path: Path) -> None:
    words = ["--model", assets / "models" / "llama", "--data", assets / "data" / "text", "--max-steps", STEPS]
    words += ["--gradient-accumulation-steps", 2] if layout in ("ddp", "fsdp") else []
    variables = launching.accelerate_environment(layout, tmp_path)
    stock, own = (forged_run("accelerate_script.py", words, recipe, variables) for recipe in ("", RECIPE))
    assert stock.code == own.code == 0, own.output[-4000:]
    assert list(stock.logged("loss")) == list(range(1, STEPS + 1))
    assert list(stock.logged("eval_loss")) == [STEPS]
    compare(stock, own)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_methods_that_a_program_assigns_anew_are_planned_all_the_same(
    model: str, forged_run: Trained, assets: Path, tmp_path: Path
) -> None:
    """As Unsloth does when it loads a model; the script says what is rebuilt."""
    words = [*launching.COMMON, "--model", assets / "models" / model, "--data", assets / "data" / "text"]
    words += ["--max_steps", 4, *TWICE.split(), "--output_dir", tmp_path / "out"]
    runs, tokens = [], []
    for recipe in ("", RECIPE):
        measured = tmp_path / f"measured{len(runs)}"
        measured.mkdir()
        runs.append(forged_run("unsloth_script.py", words, recipe, {"HOSTS_MEASURED": str(measured)}))
        assert runs[-1].code == 0, runs[-1].output[-4000:]
        tokens.append(sum(json.loads(path.read_text())["tokens"] for path in measured.iterdir()))
    compare(*runs)
    assert 0 < tokens[1] < 0.8 * tokens[0]
    assert "nothing is planned" not in runs[1].output
