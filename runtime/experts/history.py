"""What all ranks together sent to the experts of each layer in a step: what planners may learn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.aliases import Floats
from ...core.costs.context import ExpertContext
from ...core.experts.history import updated
from ...core.planning.chain import PlanChain
from ..world.agreement import everyone
from .gate import Load


def sums_of(loads: Sequence[Load], experts: ExpertContext) -> Floats | None:
    """Tokens of all ranks for each expert of each layer [L, E], the same on every rank; None where nothing was routed.

    ``loads``: this rank's of one step. Collective.
    """
    places = {layer: place for place, layer in enumerate(experts.layers)}
    own = np.zeros((len(places), experts.num_experts), dtype=np.int64)
    for load in loads:
        if load.layer in places:
            own[places[load.layer]] += load.counts
    sums: Floats = np.stack(everyone(own)).sum(axis=0).astype(np.float64)
    return sums if sums.any() else None


def learned(chain: PlanChain, loads: Sequence[Load]) -> PlanChain:
    """The chain after a step in which this rank had such loads; the same on every rank. Collective where the chain
    needs them."""
    experts = chain.context.experts
    if not chain.layers.need_loads or experts is None:
        return chain
    sums = sums_of(loads, experts)
    return chain if sums is None else chain.with_loads(updated(experts.loads, sums))
