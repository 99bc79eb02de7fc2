"""What planners learn from a live Megatron-Core model: its sizes, and the trainer's traits in its precision."""

from __future__ import annotations

from typing import Any

import torch

from .....core.machine.layout import Layout
from .....core.machine.shape import ExpertShape, Shape
from .....core.planning.chain import PlanChain
from .....core.recipe.recipe import Recipe
from ...base.traits import traits_of


def chain_of(recipe: Recipe, gpt: Any, layout: Layout, *, warn: bool, whole: bool = True) -> PlanChain:
    """The planners of a recipe for a GPTModel; `PlanChain.of_model` has the arguments. Raises EvenloadError."""
    dtype = {torch.float32: "fp32", torch.float64: "fp64"}.get(gpt.config.params_dtype, "bf16")
    shape, traits = shape_of(gpt.config, gpt.vocab_size, layout.pp), traits_of(dtype, recipe.megatron)
    return PlanChain.of_model(recipe, shape, layout, traits, warn=warn, whole=whole)


def shape_of(config: Any, vocab_size: int, num_stages: int) -> Shape:
    """The sizes that a TransformerConfig tells."""
    return Shape(
        # Where stages have unequal numbers of layers no order runs, and costs are those of the next equal number.
        -(-config.num_layers // num_stages) * num_stages,
        config.hidden_size,
        config.ffn_hidden_size,
        config.kv_channels * config.num_attention_heads,
        config.kv_channels * config.num_query_groups,
        vocab_size,
        config.gated_linear_unit,
        _experts_of(config),
        heads=config.num_attention_heads,
    )


def _experts_of(config: Any) -> ExpertShape | None:
    if not config.num_moe_experts:
        return None
    every = config.moe_layer_freq
    layers = range(config.num_layers)
    return ExpertShape(
        config.num_moe_experts,
        config.moe_router_topk,
        config.moe_ffn_hidden_size or config.ffn_hidden_size,
        config.moe_shared_expert_intermediate_size or 0,
        tuple(layer for layer in layers if (layer % every == 0 if isinstance(every, int) else every[layer])),
    )
