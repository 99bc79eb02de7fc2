"""What no plan of a setting beats: the certified bounds that plans print, asked before there is one.

Where the trainer overlaps the gradient sum it does so in its own schedule alone, which runs whole sequences, each on
one rank. So no step takes less than the least of

    such a plan         its passes, which share and cut nothing, and the update
    any other           passes as the plugins may make them, the whole gradient sum, and the update
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..balance.step_bound import passes_bound_s
from ..plan.step_plan import Lengths
from ..simulate.step import after_passes_s
from .chain import PlanChain
from .judge import budget_bytes


def step_floor_s(chain: PlanChain, batch: Lengths, *, fits: bool = True, asked: bool = False) -> float:
    """No plan of a batch under these settings takes a step of less [s].

    ``fits``: none that fits into the device; else into any. ``asked``: the plugins are asked for bounds of their own,
    which takes longer.
    """
    plugins_s = _plugins_s(chain, batch) if asked else 0.0
    passes_s = max(plugins_s, chain.passes_bound_s(batch, fits=fits))
    floor_s = passes_s + after_passes_s(chain.context, overlaps=False)
    if not chain.context.traffic.overlap_gradients:
        return floor_s
    in_schedule = max(plugins_s + after_passes_s(chain.context), in_schedule_s(chain, batch, fits=fits))
    return min(floor_s, in_schedule)


def in_schedule_s(chain: PlanChain, batch: Lengths, *, fits: bool = True) -> float:
    """No plan that the trainer's own schedule runs takes a step of less [s]; infinite where none can."""
    caps = replace(chain.caps, whole_sequences=True)
    if batch.max(initial=0) > caps.max_tokens:
        return math.inf
    room_bytes = budget_bytes(caps, chain.context) if fits else math.inf
    whole_s = passes_bound_s(batch, caps, chain.context, orders=chain.orders, room_bytes=room_bytes)
    return whole_s + after_passes_s(chain.context)


def _plugins_s(chain: PlanChain, batch: Lengths) -> float:
    """The largest of the plugins' own bounds of the passes [s]; 0: they have none."""
    if chain.orders and chain.context.costs.recompute:
        return 0.0
    rows = [(plugin.estimates.floor_s, config) for plugin, config in chain.links]
    bounds = [bound_s(batch, chain.caps, chain.context, config) for bound_s, config in rows if bound_s]
    return max(bounds, default=0.0)
