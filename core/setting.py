"""From a recipe to what planners need: the cluster, the costs of one stage, and the limits every plan is held to."""

from __future__ import annotations

from pathlib import Path

from . import cluster as clusters
from . import costs as cost_models
from .layout import Layout
from .recipe import Recipe
from .registry import Situation
from .stock import UNCAPPED
from .workload import Limits

RECIPES = Path(__file__).parent.parent / "recipes"
BYTE_VOCABULARY = 256
VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}


def situation_of(recipe: Recipe, layout: Layout) -> Situation:
    """Cluster, costs of one stage of one tensor-parallel rank, and layout. Raises EvenloadError for unknown names."""
    cluster = clusters.load(recipe.cluster, RECIPES / "clusters")
    costs = costs_of(recipe, cluster)
    if recipe.train.recompute:
        kept = recipe.model.num_layers * recipe.model.hidden_size * VALUE_BYTES[recipe.train.dtype]
        costs = costs.recomputed(kept)
    return Situation(costs.of_stage(layout), layout, cluster)


def costs_of(recipe: Recipe, cluster: clusters.Cluster) -> cost_models.Costs:
    """The recipe's cost model for the whole model on one device."""
    if recipe.costs != "auto":
        return cost_models.load(recipe.costs, RECIPES / "costs")
    model = recipe.model
    return cost_models.analytic(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_heads,
        vocab_size=model.vocab_size or BYTE_VOCABULARY,
        gated=model.gated,
        cluster=cluster,
        bytes_per_value=VALUE_BYTES[recipe.train.dtype],
    )


def limits_of(recipe: Recipe, situation: Situation) -> Limits:
    """What the trainer and the machine allow. The token cap is a plugin's to set."""
    layout, memory = situation.layout, situation.costs.memory
    layers = max(1, recipe.model.num_layers // layout.pp)
    value_bytes = VALUE_BYTES[recipe.train.dtype]
    # dK and dV are summed in float32 where K and V are half precision (runtime.prefix).
    kv_grad = memory.kv_bytes_per_token * max(1.0, 4 / value_bytes)
    return Limits(
        num_ranks=layout.plane_size,
        max_tokens=UNCAPPED,
        num_stages=layout.pp,
        layers_per_stage=layers,
        equal_counts=recipe.trainer == "deepspeed" and recipe.deepspeed.zero_stage == 3,
        activation_bytes_per_token=memory.activation_bytes_per_token / layers,
        kv_bytes_per_token=memory.kv_bytes_per_token / layers,
        replay_bytes_per_token=memory.replay_bytes_per_token / layers,
        kv_grad_bytes_per_token=kv_grad / layers,
        input_bytes_per_token=recipe.model.hidden_size * value_bytes,
    )
