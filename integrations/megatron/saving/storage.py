"""Writes Megatron's torch_dist checkpoints from this process, without helper processes.

Stock Megatron-Core 0.16 writes even a synchronous checkpoint through forked children and a spawned manager process:
2.5 s for the smallest model on 2 shared cores, a hang if the kernel kills the child for its memory, a manager that
outlives a killed rank, and scripts that must guard their main module. The same plan goes here through torch's own file
writer, in threads, whose faults reach all ranks as one exception. The files are in the same format: stock
``dist_checkpointing.load`` reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ....runtime.world.agreement import Group
from ..base.compat import save_common_state


class InProcessWriter(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """A ``sharded_strategy`` for ``dist_checkpointing.save(..., async_sharded_save=True)``. ``group``: of all ranks,
    over which a write in the background is agreed upon; None: it is in the foreground, and nothing is copied."""

    def __init__(self, group: Group) -> None:
        super().__init__("torch_dist", 1)
        self._group = group

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path, async_strategy: str = ""
    ) -> AsyncRequest:
        """Copy this rank's shards, each tensor once by its main replica; the request that writes them and flushes them
        to the disk. It is to be called by all ranks and has nothing to finalize."""
        save_common_state(sharded_state_dict, Path(checkpoint_dir))
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        for shard in (shard for shards in by_key.values() for shard in shards if self._group is not None):
            shard.data = shard.data.detach().to("cpu", copy=True) if isinstance(shard, ShardedTensor) else shard.data
        return AsyncRequest(self._write, (mcore_to_pyt_state_dict(by_key, False), checkpoint_dir), [])

    def _write(self, state: dict[str, Any], checkpoint_dir: str | Path) -> None:
        save(
            state,
            storage_writer=FileSystemWriter(checkpoint_dir, sync_files=True, thread_count=self.thread_count),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._group,
        )
        # What Megatron does after a write, without its barrier over all ranks: the next agreement is one.
        if dist.get_rank() == 0:
            save_config(CheckpointingConfig(self.backend, self.version), checkpoint_dir)
