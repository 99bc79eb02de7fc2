"""What all ranks together sent to the experts of each layer in a step: what planners may learn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.aliases import Floats
from ...core.costs.context import ExpertContext
from ..world.agreement import everyone
from .gate import Load


def sums_of(loads: Sequence[Load], experts: ExpertContext) -> Floats | None:
    """Tokens of all ranks for each expert of each layer [L, E], the same on every rank; None where nothing was routed.

    ``loads``: this rank's of one step. Collective.
    """
    places = {layer: place for place, layer in enumerate(experts.layers)}
    own = np.zeros((len(places), experts.num_experts), dtype=np.int64)
    for load in loads:
        own[places[load.layer]] += load.counts
    sums: Floats = np.stack(everyone(own)).sum(axis=0).astype(np.float64)
    return sums if sums.any() else None
