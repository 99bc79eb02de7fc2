"""Who fits into memory: what adapters take, beside the base and the activations of the largest micro-batch."""

from __future__ import annotations

import math
from dataclasses import replace

from ....core.costs.memory import activation_budget_bytes
from ....core.planning.chain import PlanChain
from ....core.planning.stock import UNCAPPED


def free_bytes(chain: PlanChain, longest: int) -> float:
    """What the memory of a device leaves for adapters with their gradients and moments; ``longest``: tokens of the
    longest sample, which make the largest micro-batch where no plugin caps it."""
    memory, caps = chain.context.costs.memory, chain.caps
    uncapped = replace(chain.limits, max_activation_bytes=math.inf)
    budget = activation_budget_bytes(chain.context.cluster, memory, uncapped)
    tokens = caps.max_tokens if caps.max_tokens < UNCAPPED else longest
    working = max(memory.working_bytes_per_token, memory.head_working_bytes_per_token)
    kept = memory.activation_bytes_per_token + memory.head_bytes_per_token
    passes = tokens * (kept * chain.context.layout.pp + working)
    return budget - min(passes, caps.max_activation_bytes)
