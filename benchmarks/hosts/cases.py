"""Upstream's own scripts: where each lies in its checkout, and how it is called."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import launching

Arguments = Callable[[Path, str], list[str]]
"""Of the folder of assets and a layout."""

LAYOUTS = launching.LAYOUTS
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
"""torch_adam: DeepSpeed's own is compiled at its first use."""


PRINTED = {
    "loss": re.compile(r"Step (\d+), Loss: ([\d.]+)"),
    "eval_loss": re.compile(r"epoch (\d+): perplexity: ([\d.]+)"),
}
"""What scripts without a Trainer print, by step or epoch."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    checkout: str
    path: str
    layouts: tuple[str, ...]
    arguments: Arguments
    trainer: str = "transformers"
    by_environment: dict[str, Any] | None = None
    """Where the environment tells the layout, as ``accelerate launch`` does: what the ds_config has besides."""
    note: str = ""
    ranks: int = launching.RANKS
    recipes: tuple[str | None, str | None] = (None, None)
    """Of the stock run, if it needs one, and of the run with plugins; None: packing alone."""
    printed: dict[str, re.Pattern[str]] = field(default_factory=lambda: PRINTED)
    has_stock: bool = True
    """Whether there is a stock run to compare with: not where the question is what evenload says."""
    exact: bool = False
    """Its gradients can be compared in float64."""

    @property
    def name(self) -> str:
        return f"{self.checkout} {Path(self.path).name}"


def trained(folder: Path, layout: str) -> list[str]:
    """Arguments that all of Transformers' trainers take: 20 steps, an evaluation every 5."""
    shared = launching.trainer_arguments(layout, folder)
    steps = "--max_steps 20 --gradient_accumulation_steps 2 --eval_strategy steps --eval_steps 5"
    return [*launching.COMMON, *steps.split(), "--output_dir", str(folder / "out"), *shared]


def _run_clm(folder: Path, layout: str) -> list[str]:
    files = ["--train_file", str(folder / "data" / "text.txt"), "--block_size", "128"]
    model = ["--model_name_or_path", str(folder / "models" / "llama")]
    return [*model, *files, "--do_train", "--do_eval", *trained(folder, layout)]


def _sft(folder: Path, layout: str) -> list[str]:
    model = ["--model_name_or_path", str(folder / "models" / "llama"), "--dtype", "float32", "--bf16", "False"]
    return [*model, "--dataset_name", str(folder / "data" / "completions"), *trained(folder, layout)]


def _sft_lora(folder: Path, layout: str) -> list[str]:
    lora = "--use_peft --lora_r 4 --lora_dropout 0 --gradient_checkpointing True"
    return [*_sft(folder, layout), *lora.split()]


def _peft(folder: Path, layout: str) -> list[str]:
    model = ["--model_name_or_path", str(folder / "models" / "llama"), "--bf16", "False"]
    lora = "--use_peft_lora True --lora_r 4 --lora_dropout 0 --lora_target_modules q_proj,v_proj --max_length 512"
    return [*model, "--dataset_name", str(folder / "data" / "chat"), *lora.split(), *trained(folder, layout)]


def _dpo(folder: Path, layout: str) -> list[str]:
    model = ["--model_name_or_path", str(folder / "models" / "llama"), "--dtype", "float32", "--bf16", "False"]
    return [*model, "--dataset_name", str(folder / "data" / "preferences"), *trained(folder, layout)]


def _accelerate(folder: Path, _: str) -> list[str]:
    files = ["--train_file", str(folder / "data" / "text.txt"), "--block_size", "128"]
    model = ["--model_name_or_path", str(folder / "models" / "llama"), "--output_dir", str(folder / "out")]
    steps = "--per_device_train_batch_size 2 --max_train_steps 20 --num_train_epochs 1 --seed 1 --learning_rate 1e-3"
    return [*model, *files, *steps.split()]


def _zenflow(folder: Path, layout: str) -> list[str]:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    config = launching.ds_config(folder, int(layout[-1]), **sizes, optimizer=ADAM, bf16={"enabled": True})
    model = ["--model_name", str(folder / "models" / "llama"), "--output_dir", str(folder / "out")]
    steps = "--lr 1e-3 --batch_size 2 --num_train_epochs 1 --deepspeed --deepspeed_config"
    return [*model, *steps.split(), str(config)]


CASES = (
    Case("transformers", "examples/pytorch/language-modeling/run_clm.py", LAYOUTS, _run_clm),
    Case("trl", "trl/scripts/sft.py", LAYOUTS, _sft),
    Case("trl", "trl/scripts/sft.py", ("ddp", "zero2"), _sft_lora, note="LoRA, checkpointing"),
    Case("peft", "examples/sft/train.py", LAYOUTS, _peft),
    Case("trl", "trl/scripts/dpo.py", ("ddp",), _dpo),
    Case(
        "accelerate",
        "examples/by_feature/deepspeed_with_config_support.py",
        ("ddp", "zero2", "zero3"),
        _accelerate,
        by_environment={"optimizer": ADAM, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}}},
    ),
    Case(
        "DeepSpeedExamples",
        "training/DeepSpeed-ZenFlow/finetuning/finetune_llama.py",
        ("zero1",),
        _zenflow,
        trainer="deepspeed",
    ),
)
