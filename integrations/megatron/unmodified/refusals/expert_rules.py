"""Which experts a Megatron-Core loop that nobody edits may have, and what of them depends on its micro-batches."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter

from .....core.errors import EvenloadError
from ...model.experts import SEQUENCE_LOSS, routers

_CHOOSING = ("sinkhorn", "quantile_balancing")
"""Load balancing by the choice of experts itself."""
_OFF = (
    "gradient_accumulation_fusion",
    "fp8",
    "fp4",
    "moe_apply_probs_on_input",
    "moe_router_padding_for_quantization",
    "moe_pad_expert_input_to_capacity",
    "overlap_moe_expert_parallel_comm",
)
_WANTED = {"moe_token_dispatcher_type": "alltoall", "tensor_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
"""Settings under which experts run beside copies of others."""


def refuse_routers(gpt: Any) -> None:
    """Raise EvenloadError for routers that are not Megatron's own."""
    odd = sorted({type(router).__qualname__ for router in routers(gpt) if type(router) is not TopKRouter})
    if odd:
        do = "use Megatron-Core's TopKRouter, or disable evenload's plugins"
        raise EvenloadError("a router is not known to route packs as it routes samples", ", ".join(odd), do)


def refuse_experts(gpt: Any, num_chunks: int = 1) -> None:
    """Raise EvenloadError for experts that cannot run beside copies of others, and for several chunks of the model,
    whose passes meet those of other ranks in Megatron's order."""
    if num_chunks > 1:
        raise EvenloadError(
            "plugins.moe does not copy experts between virtual pipeline stages",
            f"{num_chunks} model chunks",
            "leave virtual_pipeline_model_parallel_size unset, or set plugins.moe.enabled=false",
        )
    config = gpt.config
    experts = [layer.mlp.experts for layer in gpt.decoder.layers if isinstance(layer.mlp, MoELayer)]
    odd = sorted({type(each).__qualname__ for each in experts if type(each) is not SequentialMLP})
    odd += [name for name in _OFF if getattr(config, name, None)]
    odd += [f"{name} {getattr(config, name)}" for name, value in _WANTED.items() if getattr(config, name) != value]
    if odd:
        raise EvenloadError(
            "plugins.moe does not know how these experts run, or where their gradients go",
            ", ".join(odd),
            "use SequentialMLP (moe_grouped_gemm=False) and the alltoall dispatcher without these settings and without "
            "tensor parallelism, or set plugins.moe.enabled=false",
        )


def why_together(config: Any) -> str:
    """What of a model's experts depends on which samples are in a micro-batch; empty: nothing. Micro-batches of a loop
    stay as they are then (`together`)."""
    if config.num_moe_experts is None:
        return ""
    for name in losses_of_routers(config):
        if name not in ("none", SEQUENCE_LOSS):
            return f"moe_router_load_balancing_type {name}"
    for name in ("moe_expert_capacity_factor", "moe_input_jitter_eps", "moe_expert_rank_capacity_factor"):
        if getattr(config, name, None) is not None:
            return f"{name} {getattr(config, name)}"
    return ""


def refuse_losses_of_rows(config: Any, has_borders: bool) -> None:
    """Raise EvenloadError for a balance loss of sequences where a row of the loop's batches holds several samples."""
    if has_borders and SEQUENCE_LOSS in losses_of_routers(config):
        raise EvenloadError(
            "the balance loss of sequences takes a row of a batch for one sequence, whatever samples lie in it",
            f"moe_router_load_balancing_type {SEQUENCE_LOSS}, and batches with borders between samples",
            "balance by the expert bias instead (moe_router_enable_expert_bias), or disable evenload's plugins",
        )


def losses_of_routers(config: Any) -> list[str]:
    """The kinds of load balancing of a config with experts that have an effect."""
    names, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    pairs = [(names, coefficients)] if isinstance(names, str) else zip(names, coefficients, strict=True)
    return [name for name, coefficient in pairs if name in _CHOOSING or coefficient > 0]
