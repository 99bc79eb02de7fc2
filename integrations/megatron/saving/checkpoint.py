"""Save and load through Megatron's distributed checkpoints, readable on any layout.

Model and optimizer go through ``megatron.core.dist_checkpointing`` in its torch_dist format, the distributed
optimizer as ``fully_reshardable``: stored by parameter, not by rank. On the layout that wrote it a job resumes bit for
bit; on another number of ranks, or another TP x PP, the numbers are the same and sums run in another order.

The caller, a `host.MegatronHost`, makes the directory, and commits it (manifest, rename) when every rank is done.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from numpy._core.multiarray import _reconstruct
from torch.distributed.checkpoint.api import CheckpointException

from ....core.errors import EvenloadError
from ....core.recipe.sections import Model
from ....runtime.unpickling import refuse_code, tensors_only
from ....runtime.world.agreement import Group, all_or_none
from ..base.compat import reading_common_state
from .optimizer import load_optimizer, states_in_their_places
from .sharded_experts import experts_at_home
from .storage import InProcessWriter

Result = TypeVar("Result")


METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
ABOUT = "evenload"
DATA = (_reconstruct, np.ndarray, np.dtype, np.dtypes.UInt32DType, np.dtypes.Int64DType)
"""What the saved states of random generators are made of, besides tensors and numbers."""
INDEX = ".metadata"
_METADATA = (
    "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata _MEM_FORMAT_ENCODING"
)
_INDEX_NAMES = {
    "pathlib.PosixPath",
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    *(f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in _METADATA.split()),
}
"""What torch's index of a checkpoint is made of; it is a pickle that torch reads as it is."""


def save(host: Any, directory: Path) -> None:
    """Write model, optimizer and random states into an existing directory. Collective. Raises EvenloadError: the
    directory is missing or holds something, or the disk refused; the same on every rank."""
    snapshot(host, directory, None)()


def snapshot(host: Any, directory: Path, group: Group) -> Callable[[], None]:
    """Copy all that `save` writes, and write what is no tensor; the call that writes the copy, collective over
    ``group``. Collective. Both raise as `save`."""
    agreed(lambda: _expect_empty(directory))
    failures = f"the checkpoint in {directory} could not be written"
    writer = InProcessWriter(group)
    with experts_at_home(host, loading=False):
        state = _sharded_state(host, loading=False)
        state[ABOUT] = _about(host)
        with _naming_failures(failures):
            request = dist_checkpointing.save(state, str(directory), writer, async_sharded_save=True)

    def written() -> bool:
        # torch tells all ranks where one of them fails; the index after it is rank 0's alone.
        with _naming_failures(failures):
            request.async_fn(*request.async_fn_args)
        return True

    def write() -> None:
        agreed(written, group)

    return write


def load(host: Any, directory: Path) -> None:
    """Read what `save` wrote. Collective. Raises EvenloadError: there is no checkpoint, it is torn, or it holds another
    model or precision; nothing is changed."""
    trust, what = host.recipe.checkpoint.trust, f"the checkpoint {directory.parent.name}"
    about = agreed(lambda: _read_about(host, directory, what))
    same_layout = about["layout"] == _about(host)["layout"]
    with experts_at_home(host, loading=True):
        state = _sharded_state(host, loading=True, with_random=same_layout)
        with (
            _naming_failures(f"the checkpoint in {directory} could not be read"),
            tensors_only(what, DATA, trust=trust),
            reading_common_state(),
        ):
            loaded = dist_checkpointing.load(state, str(directory))
        host.model.load_state_dict(loaded["model"])
        load_optimizer(host.optimizer, loaded["optimizer"])
    if same_layout:
        for name, (_, restore) in _generators().items():
            restore(loaded["random"][name])


def agreed(check: Callable[[], Result], group: Group = None) -> Result:
    """The result of ``check``, in which no rank waits for one that failed; EvenloadError on all ranks if it failed on
    any. ``group``: the ranks that call; None: all."""

    def reached() -> Result:
        try:
            return check()
        except OSError as error:
            do = "check the directory on every host"
            raise EvenloadError("the checkpoint cannot be reached", str(error), do) from error

    return all_or_none(reached, group)


@contextmanager
def _naming_failures(what: str) -> Iterator[None]:
    """Megatron's and torch's faults as an EvenloadError; their writer and reader tell all ranks when one of them fails.
    torch's CheckpointException is no Exception: whoever catches only those lets a full disk end the job."""
    do = "check the directory and the space on its disk, then try again"
    try:
        yield
    except EvenloadError:
        raise
    except CheckpointException as error:
        faults = [f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items())]
        raise EvenloadError(what, "; ".join(faults)[:2000], do) from error
    except Exception as error:  # a file system and Megatron raise whatever they like
        raise EvenloadError(what, f"{type(error).__name__}: {error}"[:2000], do) from error


def _expect_empty(directory: Path) -> bool:
    detail = "no such directory" if not directory.is_dir() else "files in it" if any(directory.iterdir()) else ""
    if detail:
        raise EvenloadError(f"{directory} cannot take a checkpoint", detail, "give a new, empty directory")
    return True


def _sharded_state(host: Any, *, loading: bool, with_random: bool = True) -> dict[str, Any]:
    metadata = {**METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    if host.trained.frozen:
        # Megatron saves all layers as one tensor, of which states of the optimizer would have a part alone.
        metadata["non_homogeneous_layers"] = True
    model = host.model.sharded_state_dict(metadata=metadata)
    with states_in_their_places(host.optimizer):
        optimizer = host.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    state = {"model": model, "optimizer": optimizer}
    if with_random:
        states = None if loading else {name: get() for name, (get, _) in _generators().items()}
        shape, place = (host.layout.pp, host.layout.tp), (host.pipeline_stage, host.tp_rank)
        state["random"] = ShardedObject("random", states, shape, place, replica_id=host.dp_cp_rank)
    return state


def _about(host: Any) -> dict[str, Any]:
    layout = host.layout
    return {
        "layout": [layout.tp, layout.pp, layout.dp, *([layout.ep] if layout.ep > 1 else []), *layout.layers],
        "dtype": host.recipe.train.dtype,
        "distributed_optimizer": bool(host.ddp.ddp_config.use_distributed_optimizer),
        "model": host.recipe.model.model_dump(mode="json", exclude={"weights"}),
        "freeze": list(host.recipe.train.freeze),
    }


def _read_about(host: Any, directory: Path, what: str) -> dict[str, Any]:
    trust = host.recipe.checkpoint.trust
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise EvenloadError(
            f"{directory} holds no complete Megatron checkpoint",
            "no metadata.json",
            "choose one that was written to the end",
        )
    refuse_code(directory / INDEX, _INDEX_NAMES, trust=trust)
    failures = f"the checkpoint in {directory} could not be read"
    with _naming_failures(failures), tensors_only(what, DATA, trust=trust), reading_common_state():
        about: dict[str, Any] | None = dist_checkpointing.load_common_state_dict(str(directory)).get(ABOUT)
    if about is None:
        raise EvenloadError(f"{directory} was not written by evenload", "no section 'evenload'", "choose another one")
    about, here = {"freeze": [], **about}, _about(host)
    # What an earlier version did not know was as a recipe that leaves it out has it.
    about["model"] = {**Model().model_dump(mode="json", exclude={"weights"}), **about["model"]}
    for name in ("model", "dtype", "distributed_optimizer", "freeze"):
        if about[name] != here[name]:
            raise EvenloadError(
                f"the checkpoint in {directory} was written with another {name.replace('_', ' ')}",
                _difference(about[name], here[name]),
                "resume with the recipe that wrote it; the layout may change, these may not",
            )
    return about


def _difference(saved: Any, here: Any) -> str:
    if isinstance(saved, dict):
        return ", ".join(f"{k}: {saved.get(k)!r}, now {here.get(k)!r}" for k in here if saved.get(k) != here.get(k))
    return f"{saved!r}, now {here!r}"


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How the state of each random generator is read and set."""
    tracker = get_cuda_rng_tracker()
    return {
        "python": (random.getstate, random.setstate),
        "numpy": (np.random.get_state, np.random.set_state),
        "torch": (torch.get_rng_state, torch.set_rng_state),
        "megatron": (tracker.get_states, tracker.set_states),
    }
