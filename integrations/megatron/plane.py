"""The ranks that share micro-batches: a `Plane` for each pipeline stage of each tensor-parallel rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from ...runtime.world.plane import Plane


def open_plane(node_ranks: int = 0) -> Plane:
    """This rank's plane: Megatron's data-parallel ranks, who hold the same part of the model. Collective.

    Args:
        node_ranks: neighbouring plane ranks that share a node; 0: all do.
    """
    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    rows: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(rows, tuple(dist.get_process_group_ranks(group)))
    return Plane.make(sorted(set(rows)), node_ranks)
