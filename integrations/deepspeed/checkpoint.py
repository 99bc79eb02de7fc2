"""Save and load through DeepSpeed's own checkpoints; the caller commits the directory as the last good one.

DeepSpeed answers a missing ``latest`` with a warning and ``(None, None)``, and training would start from step 0 in
silence: here that is an error. Loading on another number of ranks:

    ZeRO 0     DeepSpeed's checkpoint is the whole model (of a stage) and loads anywhere
    ZeRO 1-3   rank 0 converts it once into ``directory/universal`` (deepspeed.checkpoint.ds_to_universal), which every
               world loads; all ranks must see the directory

At the same number of ranks a resumed run gives bit-equal losses; after a conversion they agree to rounding. Two faults
of DeepSpeed 0.19.8 are mended on the way: under ZeRO 3 a converted checkpoint comes back with ONE step counter shared
by all parameter groups (each adds 1 to it, so Adam's bias correction is wrong from the second step on: losses off by
2e-4, then 3e-3, in silence), and with the first group's weight decay in all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from ...core.errors import EvenloadError
from ...runtime.agreement import first_error
from ...runtime.watchdog import working

TAG = "state"
UNIVERSAL = "universal"
SHAPE = "evenload.json"


def save(engine: Any, directory: Path) -> None:
    """Write model and optimizer into an existing directory. Collective.

    Raises:
        OSError, RuntimeError: as DeepSpeed and the file system raise them (a full disk), on the rank that wrote.
    """
    engine.save_checkpoint(str(directory), tag=TAG)
    if engine.global_rank == 0:
        (directory / SHAPE).write_text(json.dumps(_shape(engine)))
    dist.barrier()


def load(engine: Any, directory: Path) -> None:
    """Read what `save` wrote, also on another number of ranks. Collective.

    Raises:
        EvenloadError: there is no complete checkpoint, or it was written under another ZeRO stage or precision.
    """
    saved = _read_shape(directory)
    shape = _shape(engine)
    for key in ("zero_stage", "dtype", "pp"):
        if saved.get(key, 1) != shape[key]:
            raise EvenloadError(
                f"the checkpoint {directory} was written under another {key}",
                f"{saved.get(key, 1)} there, {shape[key]} in this recipe",
                "resume with the same zero_stage, train.dtype and parallel.pp, or set checkpoint.resume=false",
            )
    if saved["world_size"] == shape["world_size"] or shape["zero_stage"] == 0:
        _load(engine, directory, TAG)
        return
    with working("converting the checkpoint"):
        convert(engine, directory)
    config, before = engine._config, engine._config.load_universal_checkpoint
    config.load_universal_checkpoint = True
    try:
        _load(engine, directory, UNIVERSAL)
    finally:
        config.load_universal_checkpoint = before


def convert(engine: Any, directory: Path) -> None:
    """Make ``directory/universal`` if it is not there. Collective; rank 0 works, in a process of its own.

    Raises:
        EvenloadError: the conversion failed, on every rank.
    """
    error = None
    if engine.global_rank == 0 and not (directory / UNIVERSAL).is_dir():
        scratch = directory / f"{UNIVERSAL}.tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        command = [sys.executable, "-m", f"{__package__}.converter", str(os.getpid()), "--inject_missing_state"]
        # The converter needs no peers; left in its environment, torchrun's variables would make it look for them.
        clean = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        }
        done = subprocess.run(
            [*command, "--input_folder", str(directory / TAG), "--output_folder", str(scratch)],
            env=clean,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            error = (done.stderr.strip() or "no message").splitlines()[-1]
        else:
            scratch.rename(directory / UNIVERSAL)
    failed = first_error(error)
    if failed:
        raise EvenloadError(
            f"the checkpoint {directory} cannot be converted for another number of ranks",
            failed[0][1],
            "resume on the number of ranks that wrote it",
        )


def _load(engine: Any, directory: Path, tag: str) -> None:
    groups = engine.basic_optimizer.param_groups
    chosen = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    path, _ = engine.load_checkpoint(str(directory), tag=tag)
    for state in engine.basic_optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
    for group, values in zip(engine.basic_optimizer.param_groups, chosen, strict=True):
        group.update(values)
    if path is None:
        raise EvenloadError(
            f"DeepSpeed loaded nothing from {directory}",
            f"tag '{tag}'",
            "choose another checkpoint, or set checkpoint.resume=false to start anew",
        )


def _shape(engine: Any) -> dict[str, Any]:
    return {
        "world_size": dist.get_world_size(),
        "zero_stage": int(engine.zero_optimization_stage()),
        "dtype": "bf16" if engine.bfloat16_enabled() else "fp32",
        "pp": getattr(engine, "num_stages", 1),
        "deepspeed": deepspeed.__version__,
    }


def _read_shape(directory: Path) -> dict[str, Any]:
    try:
        shape = json.loads((directory / SHAPE).read_text())
    except (OSError, ValueError) as error:
        raise EvenloadError(
            f"{directory} holds no complete DeepSpeed checkpoint",
            str(error),
            "choose another checkpoint, or set checkpoint.resume=false to start anew",
        ) from error
    return dict(shape)
