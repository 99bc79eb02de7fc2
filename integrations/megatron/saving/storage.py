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

from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save


class InProcessWriter(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """A ``sharded_strategy`` for ``dist_checkpointing.save``."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write this rank's shards, each tensor once by its main replica, and flush them to the disk. Collective."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FileSystemWriter(checkpoint_dir, sync_files=True, thread_count=self.thread_count),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
