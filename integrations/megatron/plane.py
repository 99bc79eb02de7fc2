"""Which ranks exchange tensors: those that share micro-batches, and the pipeline stages of one data-parallel rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from ...core.aliases import Ranks
from ...runtime.stage.stage_links import StageLinks
from ...runtime.world.agreement import rows_of_all
from ...runtime.world.plane import Plane


def open_plane(node_ranks: int = 0) -> Plane:
    """This rank's plane: Megatron's data-parallel ranks, who hold the same part of the model. Collective.
    ``node_ranks``: neighbouring plane ranks that share a node; 0: all do."""
    return Plane.make(_rows(parallel_state.get_data_parallel_group(with_context_parallel=True)), node_ranks)


def stage_links() -> StageLinks:
    """The links to the neighbouring pipeline stages. Collective."""
    return StageLinks(_rows(parallel_state.get_pipeline_model_parallel_group()))


def _rows(group: Any) -> list[Ranks]:
    return rows_of_all(dist.get_process_group_ranks(group))
