"""Chains of planners as recipes ask for them, and batches with a long tail: what tests of all plugins plan."""

from typing import Any

import numpy as np
from evenload.api import load_plugins
from evenload.core.machine.cluster import Cluster, Link
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse

load_plugins()


def chain_of(recipe: dict[str, Any]) -> PlanChain:
    asked = parse(recipe)
    return PlanChain.of_recipe(asked, asked.layout())


def packing_chain(
    dp: int, *, zero: int | None = None, pp: int = 1, cp: int = 1, micro_batch_size: int = 1, **packing: Any
) -> PlanChain:
    """Packing alone, of Megatron-Core's ranks or at a ZeRO stage of DeepSpeed."""
    return chain_of(
        {
            "trainer": "megatron" if zero is None else "deepspeed",
            "parallel": {"dp": dp, "pp": pp, "cp": cp},
            "deepspeed": {"zero_stage": zero or 0},
            "train": {"global_batch_size": 4096, "micro_batch_size": micro_batch_size},
            "plugins": {"packing": {"enabled": True, **packing}},
        }
    )


def heavy_tail(seed: int, count: int, longest: int) -> np.ndarray:
    """Lengths like those of documents: lognormal, p50 about 350, p99 about 11,000 (Wikipedia's shape)."""
    draw = np.random.default_rng(seed).lognormal(np.log(350), 1.45, size=count)
    return np.clip(draw, 2, longest).astype(np.int64)


def device(**more: Any) -> Cluster:
    """Of a cluster without latencies."""
    link = Link(latency_s=0.0, bytes_per_s=more.pop("bytes_per_s", 1e12))
    own = {"name": "test", "source": "test", "ranks_per_node": 8, "flops_per_s": 1.0, "memory_bytes": 1e12}
    return Cluster(**own | more, intra=link, inter=link)
