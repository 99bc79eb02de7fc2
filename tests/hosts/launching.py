"""Runs a training script on two CPU ranks, in a layout of Transformers and Accelerate, and reads what it logged.

`launch` starts it as a user does, by torchrun, and with a recipe through ``evenload run``.
The script knows nothing of that: a layout is arguments of `TrainingArguments` (`trainer_arguments`), or what
Accelerate's launcher puts into the environment (`accelerate_environment`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS, STARTUP = HERE / "scripts", HERE / "startup"
LAYOUTS = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp")
RANKS = 2
RECIPE = "trainer: transformers\nplugins:\n  packing: {enabled: true, max_tokens: 1024}\n"
COMMON = [
    *("--use_cpu", "--seed", "1", "--disable_tqdm", "True", "--report_to", "none", "--save_strategy", "no"),
    *("--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "4"),
    *("--learning_rate", "1e-3", "--lr_scheduler_type", "constant"),
    *("--logging_steps", "1", "--logging_nan_inf_filter", "False"),
]
"""Arguments of every script that takes `TrainingArguments`."""


@dataclass(frozen=True)
class Run:
    """How a script ended, all that its ranks printed, and what rank 0 logged."""

    code: int
    output: str
    history: list[dict[str, Any]] = field(default_factory=list)

    def logged(self, name: str) -> dict[int, float]:
        return {row["step"]: row[name] for row in self.history if name in row}


def ds_config(folder: Path, stage: int, **sections: Any) -> Path:
    """A ds_config of this ZeRO stage that leaves the rest to the script's own arguments."""
    path = folder / f"zero{stage}.json"
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 3},
    }
    path.write_text(json.dumps(config | sections))
    return path


def trainer_arguments(layout: str, folder: Path) -> list[str]:
    """What brings a script with `TrainingArguments` into a layout."""
    if layout.startswith("zero"):
        return ["--deepspeed", str(ds_config(folder, int(layout[-1])))]
    return ["--fsdp"] if layout == "fsdp" else []


def accelerate_environment(layout: str, folder: Path, **sections: Any) -> dict[str, str]:
    """What ``accelerate launch`` tells a script of a layout; `sections` are further ones of a ds_config."""
    if layout.startswith("zero"):
        sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
        path = ds_config(folder, int(layout[-1]), **sizes, **sections)
        return {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path),
            "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        }
    if layout == "fsdp":
        return {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_RESHARD_AFTER_FORWARD": "true",
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        }
    return {}


def environment(folder: Path) -> dict[str, str]:
    """Of a process of a user, on CPUs and offline, that leaves nothing outside `folder`."""
    local = {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in (name for _, name in socket.if_nameindex()) else {}
    paths = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        **local,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "huggingface"),
        "HOSTS_OUT": str(folder / "history.json"),
    }


def megatron_environment(folder: Path, script: Path, float64: bool = False) -> dict[str, str]:
    """What a script of a checkout of Megatron-LM needs on CPUs, and leaves its figures by, in `folder`."""
    checkout = next(parent for parent in script.parents if (parent / "pretrain_gpt.py").is_file())
    paths = [str(STARTUP), str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    shared = {"HOSTS_MEGATRON": str(folder), "PYTHONPATH": os.pathsep.join(paths), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return shared | ({"HOSTS_FLOAT64": "1"} if float64 else {})


def launcher(name: str, ranks: int = RANKS) -> list[str]:
    """What stands before a script: torchrun or `forked` starts its ranks, Python one."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = {"python": [], "torchrun": torchrun, "forks": [str(HERE / "forked.py"), str(ranks)]}
    return [sys.executable, *words[name]]


def launch(
    script: Path,
    arguments: Sequence[object],
    folder: Path,
    recipe: Path | None = None,
    started_by: str = "torchrun",
    ranks: int = RANKS,
    variables: dict[str, str] | None = None,
    limit_s: float = 240.0,
) -> Run:
    """Run the script to its end in `folder`, with ``evenload run`` where there is a recipe; its output stays in
    ``folder/output.txt``. A run longer than `limit_s` ends with all its processes and code -9."""
    folder.mkdir(parents=True, exist_ok=True)
    around = [sys.executable, "-m", "evenload", "run", str(recipe), "--"] if recipe else []
    command = [*around, *launcher(started_by, ranks), str(script), *map(str, arguments)]
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder) | (variables or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            end_session(process)
    return read_run(folder, code)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the processes that the command started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def read_run(folder: Path, code: int) -> Run:
    """The run that ended in this folder with this code."""
    history = folder / "history.json"
    rows = json.loads(history.read_text()) if history.exists() else []
    return Run(code, (folder / "output.txt").read_text(errors="replace"), rows)


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest relative difference of two logged values by step; both must have the same steps."""
    assert one.keys() == other.keys(), f"steps {sorted(one.keys() ^ other.keys())} were logged by one run alone"
    return max((abs(one[step] - other[step]) / max(abs(one[step]), 1e-12) for step in one), default=0.0)
