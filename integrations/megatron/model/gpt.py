"""Megatron-Core's own GPTModel, data-parallel wrapper and optimizer, built from a recipe."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import optimizer as optimizers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from ....core.machine.layout import Layout
from ....core.recipe.recipe import Recipe
from ....runtime.attributes import with_attributes
from ....runtime.stage.lookup import sum_in_float32
from ....runtime.world.replicas import is_replica
from ..base.setup import check_recipe
from ..base.traits import layers_of_stages
from .attention import packed_layer_spec, stock_layer_spec
from .experts import fields_of_experts, tell_routers
from .rope import use_token_positions
from .v_shape import StagePlace, VShaped
from .vocabulary import hide_padding, padded_vocabulary

log = logging.getLogger("evenload")

_TORCH_ADAM = {"Adam": torch.optim.AdamW, "USING_PYTORCH_OPTIMIZER": True}
"""In float64, which the fused Adam of Transformer Engine and of Apex does not take."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def transformer_config(recipe: Recipe, layout: Layout, **changes: Any) -> TransformerConfig:
    """Megatron's TransformerConfig of the recipe's model on a layout; ``changes`` override any of its fields."""
    model, family, dtype = recipe.model, recipe.model.kind, DTYPES[recipe.train.dtype]
    fields: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_size,
        "ffn_hidden_size": model.ffn_size,
        "normalization": "RMSNorm" if family.gated else "LayerNorm",
        "gated_linear_unit": family.gated,
        "activation_func": F.silu if family.gated else F.gelu,
        # The fused SwiGLU is made for torch.compile on a GPU; run eagerly on a CPU it makes the whole step 8% slower.
        "bias_activation_fusion": family.gated and torch.cuda.is_available(),
        "add_bias_linear": not family.gated,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": recipe.megatron.sequence_parallel and layout.tp > 1,
        "pipeline_model_parallel_size": layout.num_stages,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "calculate_per_token_loss": True,
        "deallocate_pipeline_outputs": True,
        # Weights come from `weights.initialise`; Megatron still marks how each tensor is cut.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
    }
    if layout.pp > 1:
        # Packs differ in length from one to the next. megatron-core 0.16 wants the dispatcher even without experts.
        fields |= {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    if layout.layers:
        fields["pipeline_model_parallel_layout"] = layers_of_stages(layout.layers)
    if model.norm_epsilon is not None:
        fields["layernorm_epsilon"] = model.norm_epsilon
    fields |= fields_of_experts(model, layout, dtype)
    if recipe.train.recompute:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**(fields | changes))


def build_model(
    recipe: Recipe,
    config: TransformerConfig,
    *,
    first: bool,
    last: bool,
    packed: bool = True,
    pg_collection: Any = None,
) -> GPTModel:
    """A bare GPTModel of one pipeline stage, weights not yet set.

    Args:
        first, last: whether the stage holds the embedding, and the output layer.
        packed: with packed attention and rotary embeddings by token; False gives Megatron's stock local model.

    Raises:
        EvenloadError: the recipe describes a model that cannot be built here.
    """
    check_recipe(recipe)
    stage = pg_collection.pp.rank() if pg_collection else None
    spec = packed_layer_spec(config, stage) if packed else stock_layer_spec(config, stage)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocabulary(recipe),
        max_sequence_length=recipe.data.max_length,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope",
        rotary_base=recipe.model.rotary_base,
        rope_scaling=recipe.model.rope_scaling_factor is not None,
        rope_scaling_factor=recipe.model.rope_scaling_factor or 1.0,
        share_embeddings_and_output_weights=recipe.model.tied_embeddings,
        pg_collection=pg_collection,
    )
    if config.params_dtype == torch.float64:
        model.double()  # torch's norms do not ask for params_dtype
    if last:
        hide_padding(model.output_layer, recipe)
    if not packed:
        return model
    tell_routers(model)
    if first:
        sum_in_float32(model.embedding.word_embeddings)
    return use_token_positions(model)


def build_stages(recipe: Recipe, config: TransformerConfig, layout: Layout, device: int) -> nn.Module:
    """The bare GPTModel of a device of a pipeline, or in a V both of them (`VShaped`), weights not yet set. Raises as
    `build_model`."""
    last = layout.num_stages - 1
    if not layout.v_shape:
        return cast(nn.Module, build_model(recipe, config, first=device == 0, last=device == last))
    groups = [(stage, StagePlace(stage, layout.num_stages).groups()) for stage in layout.stages_of_device(device)]
    return VShaped(
        *(build_model(recipe, config, first=stage == 0, last=stage == last, pg_collection=g) for stage, g in groups)
    )


def wrap_model(recipe: Recipe, config: TransformerConfig, model: nn.Module) -> DistributedDataParallel:
    """Megatron's DDP around the model; bf16 goes through Float16Module and reduces its gradients in float32."""
    half = recipe.train.dtype == "bf16"
    inner: Any = model
    if half:
        inner = inner.in_half() if isinstance(model, VShaped) else Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=half,
        overlap_grad_reduce=recipe.megatron.overlap_grad_reduce,
        use_distributed_optimizer=uses_distributed_optimizer(recipe),
    )
    return DistributedDataParallel(config=config, ddp_config=ddp_config, module=inner)


def build_optimizer(recipe: Recipe, ddp: DistributedDataParallel) -> Any:
    """Megatron's Adam (decoupled weight decay, of matrices alone) over the wrapped model.

    In float64 it neither shards nor clips: both insist on float32. The host clips by itself there, and where replicas
    have to clip by one number.
    """
    train, exact = recipe.train, recipe.train.dtype == "fp64"
    if exact and recipe.megatron.distributed_optimizer:
        log.warning("megatron.distributed_optimizer has no effect with train.dtype fp64: Megatron-Core shards float32")
    config = OptimizerConfig(
        optimizer="adam",
        lr=train.lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        adam_eps=train.eps,
        clip_grad=0.0 if exact or is_replica() else train.clip_grad,
        bf16=train.dtype == "bf16",
        params_dtype=DTYPES[train.dtype],
        use_distributed_optimizer=uses_distributed_optimizer(recipe),
    )
    with with_attributes(optimizers, **_TORCH_ADAM) if exact else nullcontext():
        optimizer = get_megatron_optimizer(config, [ddp])
    for group in optimizer.param_groups:
        # Megatron-LM's scheduler does this in every step; the optimizer by itself decays norms and biases too.
        group["weight_decay"] = train.weight_decay * group.get("wd_mult", 1.0)
    fill_states(optimizer)
    return optimizer


def uses_distributed_optimizer(recipe: Recipe) -> bool:
    return recipe.megatron.distributed_optimizer and recipe.train.dtype != "fp64"


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that a Megatron optimizer chains, or it alone."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch-style optimizers inside a Megatron optimizer, chained or not, stubs left out."""
    return [part.optimizer for part in parts_of(optimizer) if getattr(part, "optimizer", None) is not None]


def adam_states(optimizer: Any) -> list[dict[str, Any]]:
    """What these keep, parameter by parameter."""
    return [states for one in torch_optimizers(optimizer) for states in one.state.values()]


def fill_states(optimizer: Any) -> None:
    """Give torch's Adam its states before the first step, as the step itself would.

    Megatron's distributed optimizer cannot be saved or loaded without them (it looks for the step number in states
    that torch makes only in the first step). TransformerEngine's and Apex's Adam keep their step elsewhere.
    """
    for inner in torch_optimizers(optimizer):
        if not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    zeros = torch.zeros_like(parameter)
                    inner.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def _leave(_: torch.Tensor) -> None:
    """An initialiser that leaves the tensor as it is."""
