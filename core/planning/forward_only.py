"""The same planners for steps that run forward only: a validation's batches, whose backward costs nothing.

Every planner weighs a forward and a backward. Here the backward takes no seconds, moves nothing and keeps nothing, and
there is neither a gradient sum nor an update: what is balanced is the forward, and what is held is the prefix KV of cut
sequences and what one layer, or the head, takes while it runs. Caps stay: they are promises about micro-batches.

A layer's share of what a training forward keeps stands for what it takes while it runs without gradients.
"""

from __future__ import annotations

from dataclasses import replace

from ..costs.costs import PassCost
from ..plan.limits import MemoryCost
from .chain import PlanChain


def forward_only(chain: PlanChain) -> PlanChain:
    """The chain that plans batches to be scored (`Host.score`)."""
    costs = chain.context.costs
    memory = _memory(costs.memory, chain.limits.mean_layers)
    changes = {"backward": PassCost(token_s=0.0), "memory": memory, "recompute": False, "update_s": 0.0}
    context = replace(chain.context, costs=costs.model_copy(update=changes), forward_only=True)
    return replace(chain, context=context, limits=replace(chain.limits, memory=memory, splits_backward=False))


def _memory(memory: MemoryCost, layers: float) -> MemoryCost:
    whole = memory.replay_bytes_per_token or memory.activation_bytes_per_token
    return MemoryCost(
        fixed_bytes=memory.fixed_bytes,
        sharded_bytes=memory.sharded_bytes,
        gathered_bytes=memory.gathered_bytes,
        kv_bytes_per_token=memory.kv_bytes_per_token,
        working_bytes_per_token=whole / layers,
        head_working_bytes_per_token=memory.head_bytes_per_token + memory.head_working_bytes_per_token,
    )
