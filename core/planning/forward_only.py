"""The same planners for steps that run forward only: a validation's batches, whose backward costs nothing.

Every planner weighs a forward and a backward. Here the backward takes no seconds, moves nothing and keeps nothing, and
there is neither a gradient sum nor an update: what is balanced is the forward, and what is held is the prefix KV of cut
sequences and what one layer, or the head, takes while it runs. Caps stay: they are promises about micro-batches.

Where attention leaves blocks of keys out, a sample is on one rank, and costs what its share of the pairs does.

A layer's share of what a training forward keeps stands for what it takes while it runs without gradients.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..aliases import Floats
from ..costs.costs import PassCost
from ..plan.limits import MemoryCost
from ..plan.step_plan import Lengths
from .chain import PlanChain


def forward_only(chain: PlanChain) -> PlanChain:
    """The chain that plans batches to be scored (`Host.score`)."""
    costs = chain.context.costs
    memory = _memory(costs.memory, chain.limits.mean_layers)
    changes = {"backward": PassCost(token_s=0.0), "memory": memory, "recompute": False, "update_s": 0.0}
    context = replace(chain.context, costs=costs.model_copy(update=changes), forward_only=True)
    return replace(chain, context=context, limits=replace(chain.limits, memory=memory, splits_backward=False))


def on_single_ranks(chain: PlanChain) -> PlanChain:
    """The chain without planners that let ranks share a sequence, of which no rank could leave blocks out; their caps
    stay. One that plans alone puts each sequence on a rank."""
    links = tuple(link for link in chain.links if "shares" not in link[0].decides)
    links = links or tuple((plugin, config.unshared()) for plugin, config in chain.links)
    return replace(chain, links=links, limits=replace(chain.limits, max_tokens=chain.caps.max_tokens))


def computing(chain: PlanChain, batch: Lengths, shares: Floats | None) -> PlanChain:
    """The chain for a batch whose attention computes these shares of its pairs [S]; None: all. Where sequences may be
    cut, each costs the mean share."""
    if shares is None:
        return chain
    costs, squares = chain.context.costs, 0.5 * batch.astype(np.float64) ** 2
    whole = batch.max() <= chain.caps.max_tokens
    share = float(shares.min() if whole else np.average(shares, weights=squares))
    pair_s = costs.forward.pair_s
    forward = costs.forward.model_copy(update={"pair_s": share * pair_s})
    context = replace(chain.context, costs=costs.model_copy(update={"forward": forward}))
    more_s = (shares - share) * squares * pair_s
    return replace(chain, context=context).with_beside((own, 0.0) for own in more_s.tolist() if whole)


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
