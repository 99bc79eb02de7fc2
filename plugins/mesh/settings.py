"""Which settings of the section a plan of somebody else does not keep, and which branches of the runtime they open."""

from __future__ import annotations

from ...core.costs.context import PlanningContext
from ...core.plan.branches import CUT, OFFLOADED, REMAPPED, ROUTED, SEVERAL_GROUPS, sharing
from ...core.plan.step_plan import StepPlan
from .config import MeshConfig


def breaks(plan: StepPlan, config: MeshConfig) -> str:
    """The first setting that a plan does not keep, with what it does instead; empty where it keeps all."""
    shared = [m for m in plan.micro_batches if len(m.ranks) > 1]
    degrees = {len(cp_group) for m in shared for cp_group in m.ranks_of_slices}
    engines = {m.cp_comm for m in shared} - set(config.engines)
    odd = sorted(d for d in degrees if d & (d - 1))
    most = max(degrees, default=1)
    rules = (
        (0 < config.max_degree < most, f"max_degree is {config.max_degree}, {most} ranks share a sequence"),
        (config.powers_of_two and odd, f"powers_of_two is true, {(odd or [0])[-1]} ranks share a sequence"),
        (engines, f"engines are {', '.join(config.engines)}, sequences are shared by {', '.join(sorted(engines))}"),
        (config.remap == "off" and any(m.remap for m in shared), "remap is off, tokens are moved"),
        (config.routed == "off" and any(m.routed for m in shared), "routed is off, traffic is routed"),
        (config.offload == "off" and any(plan.offload), "offload is off, activations wait in host memory"),
    )
    return next((f"plugins.mesh.{words}" for broken, words in rules if broken), "")


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
