"""Layers of a user's model: which attention and which experts packs may meet, and what of them keeps samples whole or
micro-batches as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.utils import is_layer_window_attention

from .....core.errors import EvenloadError, Rule, refuse_first
from ...base.families import ATTENTION, EXPERTS, MLP
from ...model.attention import PackedCoreAttention
from ...model.experts import SEQUENCE_LOSS, layers_with_experts, routers
from ...model.rope import TokenRope

_KNOWN_ROPES = (rotary_pos_embedding.RotaryEmbedding, yarn_rotary_pos_embedding.YarnRotaryEmbedding, TokenRope)
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
"""Settings under which experts run alongside copies of others."""


def layers_with_attention(gpt: Any) -> list[Any]:
    """Megatron's attention modules of a model, each with its ``core_attention``."""
    return [module for module in gpt.modules() if hasattr(module, "core_attention")]


def window_of(layer: Any) -> Any:
    """The window in which a layer attends, Megatron's (left, right); None where it attends to all."""
    size, every = layer.config.window_size, layer.config.window_attn_skip_freq
    return size if is_layer_window_attention(size, every, layer.layer_number) else None


def rope_owners(gpt: Any) -> list[Any]:
    """The model, and layers with latent attention: what has a ``rotary_pos_emb`` of its own."""
    owners = [gpt, *layers_with_attention(gpt)]
    return [owner for owner in owners if getattr(owner, "rotary_pos_emb", None) is not None]


def why_whole(gpt: Any, *, shares: bool) -> str:
    """What keeps samples of a GPTModel whole, each on one rank; empty where its packs may hold parts of samples.
    ``shares``: a plugin may share samples between ranks.

    Rotary embeddings, if it has some, must give their angles by position, and packed attention, which reads the prefix
    of a part, must do what the layers' own does. No layer may read the tokens after a part.
    """
    known = [type(owner.rotary_pos_emb) for owner in rope_owners(gpt)]
    odd = {f"{rope.__name__} knows borders between samples alone" for rope in known if rope not in _KNOWN_ROPES}
    if gpt.config.mtp_num_layers:
        odd.add("multi-token prediction reads the tokens after a part of a sample")
    for layer in layers_with_attention(gpt):
        config, core = layer.config, layer.core_attention
        dropout = core.attention_dropout.p if isinstance(core, DotProductAttention) else config.attention_dropout
        settings = (
            ("attention_dropout", dropout),
            ("softmax_type", config.softmax_type if config.softmax_type != "vanilla" else None),
            ("qk_clip", getattr(config, "qk_clip", False)),
            ("log_max_attention_logit", getattr(config, "log_max_attention_logit", False)),
            ("window_size", shares and window_of(layer)),
            ("fp8_dot_product_attention", getattr(config, "fp8_dot_product_attention", False)),
            ("fp8_multi_head_attention", getattr(config, "fp8_multi_head_attention", False)),
        )
        if not isinstance(core, PackedCoreAttention):
            odd |= {f"{name} {value} is known to whole samples alone" for name, value in settings if value}
    return ", ".join(sorted(odd))


def refuse_attention(gpt: Any) -> None:
    """Raise EvenloadError for attention of a model that cannot keep packed samples apart as it treats single ones."""
    layers = layers_with_attention(gpt)
    mixers = [getattr(layer, "self_attention", None) for layer in gpt.decoder.layers]
    odd = {type(m).__name__ for m in mixers if not (m is None or isinstance(m, IdentityOp) or m in layers)}
    if odd:
        raise EvenloadError(
            "a layer's attention is not known to keep packed samples apart",
            ", ".join(sorted(odd)),
            "use Megatron-Core's own, or disable evenload's plugins",
        )
    unknown = {type(o.core_attention).__name__ for o in layers if not isinstance(o.core_attention, _known())}
    if unknown:
        raise EvenloadError(
            "a layer's core attention is not known to keep packed samples apart",
            ", ".join(sorted(unknown)),
            "use Megatron-Core's local or Transformer Engine layer spec, or disable evenload's plugins",
        )
    for layer in layers:
        if not isinstance(layer.core_attention, PackedCoreAttention):
            refuse_first(*rules_of_layer(layer, isinstance(layer.core_attention, DotProductAttention)))


def rules_of_layer(layer: Any, local: bool) -> Iterable[Rule]:
    """What a layer's configuration may not ask for; ``local``: its core attention is Megatron's own."""
    config, kind, mask = layer.config, layer.attention_type, layer.attn_mask_type
    do = "change it, or disable evenload's plugins for this model"
    yield kind != "self", "packs know self-attention alone", f"attention_type {kind}", do
    yield mask != AttnMaskType.causal, "packs are causal inside each sample", f"attn_mask_type {mask}", do
    if local:
        window, sink = layer.core_attention.scale_mask_softmax.window_size, config.softmax_type
        yield sink != "vanilla", "packed attention has no sink", f"softmax_type {sink}", do
        odd = window is not None and (window[0] < 0 or window[1] != 0)
        yield odd, "Megatron's own attention knows windows of (tokens before, 0) alone", f"window_size {window}", do
    overlap = bool(getattr(config, "tp_comm_overlap", False))
    why = "Transformer Engine's buffers for overlapped tensor parallelism have one shape, and packs differ in length"
    yield overlap and not local, why, "tp_comm_overlap True", do


def _known() -> tuple[type, ...]:
    from megatron.core.extensions import transformer_engine

    # Without Transformer Engine the name is bound to a mock, which is no type.
    known = (DotProductAttention, PackedCoreAttention, getattr(transformer_engine, "TEDotProductAttention", None))
    return tuple(attention for attention in known if isinstance(attention, type))


def refuse_routers(gpt: Any) -> None:
    """Raise EvenloadError for routers that are not Megatron's own."""
    odd = sorted({type(router).__qualname__ for router in routers(gpt) if type(router) is not TopKRouter})
    if odd:
        do = "use Megatron-Core's TopKRouter, or disable evenload's plugins"
        raise EvenloadError("a router is not known to route packs as it routes samples", ", ".join(odd), do)


def refuse_experts(gpt: Any, num_chunks: int = 1) -> None:
    """Raise EvenloadError for experts that cannot run alongside copies of others, and for several chunks of the model,
    whose passes meet those of other ranks in Megatron's order."""
    if num_chunks > 1:
        raise EvenloadError(
            "plugins.moe does not copy experts between virtual pipeline stages",
            f"{num_chunks} model chunks",
            "leave virtual_pipeline_model_parallel_size unset, or set plugins.moe.enabled=false",
        )
    config = gpt.config
    experts = [layer.mlp.experts for layer in layers_with_experts(gpt)]
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


def why_together(config: Any, pattern: str | None = None) -> str:
    """What of a model depends on which samples are in a micro-batch; empty: nothing. Micro-batches of a loop stay as
    they are then (`together`). ``pattern``: of a hybrid model (`pattern_of`)."""
    if odd := sorted(set(pattern or "") - set(ATTENTION + MLP + EXPERTS)):
        return f"what layers {' '.join(odd)} of the pattern {pattern} keep of earlier tokens"
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
