"""Moe: which ranks compute which tokens of each expert, in every layer of every micro-batch (LAER-MoE, UltraEP)."""

from ...core.plan.branches import COPIED, ONCE_A_NODE
from ...core.registry import Baseline, Baselines, LayerPlugin, Needs, Shown, register
from . import baselines, config, plan

register(
    LayerPlugin(
        name="moe",
        summary="copies of busy experts on idle ranks, chosen from exact counts in every layer",
        papers=("LAER-MoE, arXiv 2602.11686", "UltraEP, arXiv 2606.04101"),
        stage=60,
        config=config.MoeConfig,
        plan=plan.plan,
        shown=Shown("copies, EP > 1", to_whole="copies, EP > 1", by=(COPIED, ONCE_A_NODE)),
        layers={**plan.LAYERS, **baselines.LAYERS},
        baselines=Baselines({name: Baseline(plan) for name, plan in baselines.BASELINES.items()}),
        needs_loads=plan.needs_loads,
        shards_experts=plan.shards_experts,
        needs=Needs(branches=plan.branches),
    )
)
