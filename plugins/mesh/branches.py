"""Which branches of the runtime the mesh section opens."""

from __future__ import annotations

from ...core.costs.context import PlanningContext
from ...core.plan.branches import CUT, OFFLOADED, REMAPPED, ROUTED, SEVERAL_GROUPS, sharing
from .config import MeshConfig


def branches(config: MeshConfig, context: PlanningContext) -> dict[str, MeshConfig]:
    """For each branch that plans may take, settings under the same caps with which they most likely do."""
    cluster, num_ranks = context.cluster, context.layout.dp_cp_size
    if num_ranks == 1 or config.max_degree == 1:
        return {CUT: config}
    opened = {sharing(cp_comm): config.model_copy(update={"engines": (cp_comm,)}) for cp_comm in config.engines}
    opened |= {SEVERAL_GROUPS: config, CUT: config}
    if config.remap == "auto":
        opened[REMAPPED] = config
    if config.routed == "auto" and cluster.ranks_per_node < num_ranks * context.layout.tp:
        opened[ROUTED] = config
    if config.offload == "auto" and cluster.host_bytes_per_s:
        opened[OFFLOADED] = config
    return opened
