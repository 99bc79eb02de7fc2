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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from ....core.errors import EvenloadError
from ....core.input import reading
from ....runtime import files
from ....runtime.attributes import with_attributes
from ....runtime.unpickling import tensors_only
from ....runtime.watchdog.watchdog import working
from ....runtime.world.agreement import first_error
from .experts import expert_ranks

TAG = "state"
UNIVERSAL = "universal"
HASHES = "universal.json"
SHAPE = "evenload.json"
_WORDS = {
    "layers": "number of layers of each stage (parallel.layers)",
    "stages": "number of pipeline stages on each device (plugins.pipeline.v_shape)",
}
DATA = (LossScaler, ZeroStageEnum, fragment_address)
"""Classes of DeepSpeed's in its checkpoints; they hold numbers and nothing else."""


def save(engine: Any, directory: Path, freeze: Sequence[str] = ()) -> None:
    """Write model and optimizer into an existing directory. Collective, also where a rank cannot write. Raises OSError,
    RuntimeError: as DeepSpeed and the file system raise them (a full disk), on the rank that wrote.
    ``freeze``: the patterns of the recipe."""
    with _catching(engine) as errors:
        engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)
    if errors:
        raise errors[0]
    if engine.global_rank == 0:
        (directory / SHAPE).write_text(json.dumps(_shape(engine, freeze)))


def load(engine: Any, directory: Path, *, freeze: Sequence[str] = (), trust: bool = False) -> None:
    """Read what `save` wrote, also on another number of ranks. Collective.

    ``trust``: load files that hold more than data, which may run code. Raises EvenloadError: there is no complete
    checkpoint, it was written under another ZeRO stage or precision or with others frozen, or it holds more than data
    and is not to be trusted.
    """
    saved = {"pp": 1, "stages": 1, "layers": [], "ep": 1, "freeze": [], **_read_shape(directory)}
    shape = _shape(engine, freeze)
    for key in ("zero_stage", "dtype", "pp", "stages", "layers", "ep", "freeze"):
        divided = key == "ep" and min(saved[key], shape[key]) > 1 and shape["zero_stage"] > 0
        if saved.get(key) != shape[key] and not divided:
            raise EvenloadError(
                f"the checkpoint {directory} was written under another {_WORDS.get(key, key)}",
                f"{saved.get(key)} there, {shape[key]} in this recipe",
                "resume with the same recipe but for the number of ranks, or set checkpoint.resume=false",
            )
    same = all(saved.get(key) == shape[key] for key in ("world_size", "ep"))
    if same or shape["zero_stage"] == 0:
        _load(engine, directory, TAG, trust=trust)
        return
    with working("converting the checkpoint"):
        convert(engine, directory, trust=trust)
    with with_attributes(engine._config, load_universal_checkpoint=True):
        _load(engine, directory, UNIVERSAL, trust=trust)


@contextmanager
def _catching(engine: Any) -> Iterator[list[Exception]]:
    """What this rank cannot write inside is noted, and the engine goes on to its barriers, in which its peers wait."""
    errors: list[Exception] = []

    def caught(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if errors:
                return None
            try:
                return write(*arguments, **named)
            except Exception as error:
                errors.append(error)
                return None

        return call

    writer, copy = engine.checkpoint_engine, caught(engine._copy_recovery_script)
    guarded = with_attributes(writer, save=caught(writer.save), makedirs=caught(writer.makedirs))
    with guarded, with_attributes(engine, _copy_recovery_script=copy):
        yield errors


def convert(engine: Any, directory: Path, *, trust: bool = False) -> None:
    """Make ``directory/universal`` if it is not there, whole. Collective; rank 0 works, in a process of its own. Raises
    EvenloadError: the conversion failed, on every rank."""
    error = None
    if engine.global_rank == 0 and not _is_converted(directory):
        scratch = directory / f"{UNIVERSAL}.tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(directory / UNIVERSAL, ignore_errors=True)
        command = [sys.executable, "-m", f"{__package__}.to_universal", str(os.getpid()), "--inject_missing_state"]
        command += ["--trust"] if trust else []
        # The converter needs no peers; left in its environment, torchrun's variables would make it look for them.
        torchrun = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        clean = {name: value for name, value in os.environ.items() if name not in torchrun}
        command += ["--input_folder", str(directory / TAG), "--output_folder", str(scratch)]
        done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
        if done.returncode:
            error = (done.stderr.strip() or "no message").splitlines()[-1]
        else:
            hashes = files.stamp(scratch, files.below(scratch))
            scratch.rename(directory / UNIVERSAL)
            (directory / HASHES).write_text(json.dumps(hashes))
    failed = first_error(error)
    if failed:
        raise EvenloadError(
            f"the checkpoint {directory} cannot be converted for another number of ranks",
            failed[0][1],
            "resume on the number of ranks that wrote it",
        )


def _is_converted(directory: Path) -> bool:
    """Whether every file of an earlier conversion is there as it was written."""
    try:
        rows = reading.read_json(directory / HASHES, HASHES, "")
        hashes = {name: files.File(*row) for name, row in rows.items()}
    except (EvenloadError, TypeError, AttributeError):
        return False
    return not files.faults(directory / UNIVERSAL, hashes, hashes=True)


def _load(engine: Any, directory: Path, tag: str, *, trust: bool) -> None:
    groups = engine.basic_optimizer.param_groups
    chosen = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    with tensors_only(f"the checkpoint {directory.parent.name}", DATA, trust=trust):
        path, _ = engine.load_checkpoint(str(directory), tag=tag)
    for state in engine.basic_optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
    for group, values in zip(engine.basic_optimizer.param_groups, chosen, strict=True):
        group.update(values)
    if path is None:
        raise EvenloadError(
            f"DeepSpeed could not load a checkpoint from {directory}",
            f"tag '{tag}'",
            "choose another checkpoint, or set checkpoint.resume=false to start anew",
        )


def _shape(engine: Any, freeze: Sequence[str]) -> dict[str, Any]:
    return {
        "world_size": dist.get_world_size(),
        "zero_stage": int(engine.zero_optimization_stage()),
        "dtype": "bf16" if engine.bfloat16_enabled() else "fp32",
        "pp": getattr(engine, "num_stages", 1),
        "stages": len(engine.module.stages) if hasattr(engine, "num_stages") else 1,
        "layers": list(getattr(engine.module, "stage_layers", ())),
        "ep": expert_ranks(engine.module),
        "freeze": list(freeze),
        "deepspeed": deepspeed.__version__,
    }


def _read_shape(directory: Path) -> dict[str, Any]:
    try:
        return reading.mapping(reading.read_json(directory / SHAPE, SHAPE, ""), SHAPE, "")
    except EvenloadError as error:
        raise EvenloadError(
            f"{directory} holds no complete DeepSpeed checkpoint",
            f"{error.what}: {error.found}",
            "choose another checkpoint, or set checkpoint.resume=false to start anew",
        ) from error
