"""Programs that people fine-tune with, each by its own command and its own YAML, on two CPU ranks.

They want other versions of Transformers than the pinned one, so each has an environment of its own (`make test-hosts`),
named as its dependency group in pyproject.toml (`here`). `train` runs one, stock or by ``evenload run``; `make` writes
what they train on.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

sys.path.append(str(Path(__file__).parents[1] / "hosts"))
import assets
import launching

STARTUP = Path(__file__).with_name("startup")
RECIPE = "trainer: transformers\nplugins:\n  packing: {enabled: true, max_tokens: 1024}\n"
TRAINING = {
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1.0e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "max_steps": 6,
    "save_strategy": "no",
    "report_to": "none",
    "bf16": False,
    "seed": 1,
}
"""What LLaMA-Factory and ms-swift hand on to Transformers, whose names they keep."""
LORA = {"lora_dropout": 0.0, "lora_alpha": 8}


class Program(NamedTuple):
    """A command that reads a YAML, and what stands in it."""

    command: tuple[str, ...]
    settings: dict[str, Any]
    full: dict[str, Any]
    """What trains all weights."""
    lora: dict[str, Any]
    after: tuple[str, ...] = ()
    """Behind the name of the YAML."""


PROGRAMS = {
    "llamafactory": Program(
        ("llamafactory-cli", "train"),
        TRAINING
        | {
            **{"model_name_or_path": "model", "stage": "sft", "do_train": True, "template": "alpaca"},
            **{"dataset": "pairs", "dataset_dir": "alpaca", "cutoff_len": 512, "overwrite_cache": True},
        },
        {"finetuning_type": "full"},
        {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all", **LORA},
    ),
    "axolotl": Program(
        ("axolotl", "train"),
        {
            **{"base_model": "model", "output_dir": "out", "sequence_len": 512, "seed": 1, "max_steps": 6},
            **{"datasets": [{"path": "alpaca/train.jsonl", "ds_type": "json", "type": "alpaca"}]},
            **{"dataset_prepared_path": "prepared", "micro_batch_size": 2, "gradient_accumulation_steps": 2},
            **{"learning_rate": 1.0e-3, "lr_scheduler": "constant", "optimizer": "adamw_torch", "bf16": False},
            **{"logging_steps": 1, "save_strategy": "no", "num_epochs": 1, "attn_implementation": "sdpa"},
        },
        {},
        {
            **{"adapter": "lora", "lora_r": 4, "lora_target_linear": True, **LORA},
            **dict.fromkeys(("lora_qkv_kernel", "lora_o_kernel", "lora_mlp_kernel", "lora_embedding_kernel"), False),
        },
        ("--launcher", "torchrun", "--", "--standalone", "--nproc-per-node", "2"),
    ),
    "swift": Program(
        ("swift", "sft"),
        TRAINING
        | {
            **{"model": "model", "model_type": "llama", "template": "default", "dataset": "alpaca/train.jsonl"},
            **{"max_length": 512, "torch_dtype": "float32", "dataset_num_proc": 1, "dataloader_num_workers": 0},
        },
        {"tuner_type": "full"},
        {"tuner_type": "lora", "lora_rank": 4, **LORA},
    ),
}


class Trained(NamedTuple):
    """What a run printed, logged and computed."""

    code: int
    output: str
    log: list[dict[str, Any]]
    """Of rank 0."""
    tokens: int
    """Places of input that all ranks computed."""
    steps: list[float]
    """Seconds at the end of each update, on rank 0."""

    def printed(self) -> list[dict[str, Any]]:
        """What the program printed of each update, to its last digit."""
        rows = [ast.literal_eval(line) for line in re.findall(r"^\{'loss': .*\}$", self.output, re.MULTILINE)]
        keys = ("loss", "grad_norm", "token_acc", "tokens/trainable")
        return [{key: row[key] for key in keys if key in row} for row in rows]


def here() -> list[str]:
    """The program whose environment this is, or none."""
    return [name for name in PROGRAMS if Path(sys.prefix).name == f".venv-{name}"]


def make(folder: Path, longest: int = assets.LONGEST, **sizes: int) -> None:
    """A tiny Llama with random weights, and pairs of instruction and answer of lognormal lengths.

    Args:
        longest: tokens of a pair.
        sizes: of the model, others than the smallest.
    """
    source = assets.library()
    tokenizer = assets.make_tokenizer(source[:400_000], longest=longest)
    config = assets.LlamaConfig(**assets.COMMON | {"max_position_embeddings": longest} | sizes)
    assets.save_model(folder / "model", config, tokenizer)
    assets.write_rows(folder / "alpaca", list(assets.draw_texts(source, tokenizer)), assets.ROWS["alpaca"])
    (folder / "alpaca" / "dataset_info.json").write_text(json.dumps({"pairs": {"file_name": "train.jsonl"}}))


def environment(folder: Path) -> dict[str, str]:
    """Of a user of this program, whose commands are those of its environment."""
    launchers = folder / "bin"
    launchers.mkdir()
    torchrun = launchers / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    inherited = launching.environment(folder)
    return {
        **inherited,
        "PATH": os.pathsep.join([str(launchers), str(Path(sys.executable).parent), inherited["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(STARTUP), inherited["PYTHONPATH"]]),
        "HOSTS_MEASURED": str(folder),
        "NPROC_PER_NODE": "2",
        "FORCE_TORCHRUN": "1",
        "DO_NOT_TRACK": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "MODELSCOPE_CACHE": str(folder / "modelscope"),
    }


def train(name: str, tuning: str, data: Path, folder: Path, recipe: str = "", **settings: Any) -> Trained:
    """Run a program to its end in `folder`, planned where there is a recipe.

    Args:
        tuning: full or lora.
        data: what `make` made.
        settings: what stands in the YAML besides.
    """
    program = PROGRAMS[name]
    folder.mkdir(parents=True)
    for made in data.iterdir():
        (folder / made.name).symlink_to(made)
    (folder / "train.yaml").write_text(yaml.safe_dump(program.settings | getattr(program, tuning) | settings))
    (folder / "recipe.yaml").write_text(recipe)
    around = [sys.executable, "-m", "evenload", "run", "recipe.yaml", "--"] if recipe else []
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [*around, *program.command, "train.yaml", *program.after],
            cwd=folder,
            env=environment(folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(400)
        finally:
            launching.end_session(process)
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("[01].json"))]
    first = ranks[0] if ranks else {"log": [], "steps": []}
    text = (folder / "output.txt").read_text(errors="replace")
    return Trained(code, text, first["log"], sum(rank["tokens"] for rank in ranks), first["steps"])
