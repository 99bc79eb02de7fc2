"""The ranks that share micro-batches: a `Plane` for each pipeline stage of each tensor-parallel rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from ...core.plan.step_plan import Op, StepPlan
from ...runtime.world.plane import Plane


def open_plane(node_ranks: int = 0) -> Plane:
    """This rank's plane: Megatron's data-parallel ranks, who hold the same part of the model. Collective.

    Args:
        node_ranks: neighbouring plane ranks that share a node; 0: all do.
    """
    mine: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    rows: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(rows, tuple(dist.get_process_group_ranks(mine)))
    return Plane.make(sorted(set(rows)), node_ranks)


def meet(plane: Plane | None, plan: StepPlan, op: Op) -> None:
    """Before a shared pass: be sure that its ranks are about to run the same one. Raises RankError."""
    micro_batch = plan.passes(op.kind)[op.micro_batch]
    if len(micro_batch.ranks) > 1:
        assert plane is not None
        assert op.kind != "W", "weight gradients concern nobody else"
        plane.meet(op.micro_batch, plan.digest, micro_batch.ranks, op.kind)
