"""The language models of Megatron-Core whose packs are known: GPTModel, and the hybrid model, whose layers are each one
thing (attention, an MLP, experts, a state space), as a pattern of letters says.

0.16         the hybrid model is `MambaModel`, and has a pattern, or ratios from which one follows
0.17         it has a pattern
0.18 on      it is `HybridModel`
"""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel

try:
    from megatron.core.models.hybrid.hybrid_model import HybridModel as _Hybrid
except ImportError:
    from megatron.core.models.mamba.mamba_model import MambaModel as _Hybrid

HybridModel: Any = _Hybrid
MODELS: tuple[Any, ...] = (GPTModel, HybridModel)
ATTENTION, MLP, EXPERTS = "*+", "-", "E"
"""Letters of layers that keep packed samples apart; ``+`` is latent attention."""


def unwrapped_chunk(chunk: Any) -> Any:
    """The model inside its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def pattern_of(model: Any) -> str | None:
    """One letter for each layer of all stages of a hybrid model, those of multi-token prediction after ``/``; None for
    another model."""
    if not isinstance(model, HybridModel):
        return None
    if hasattr(model, "hybrid_layer_pattern"):
        return str(model.hybrid_layer_pattern or "").replace("|", "")
    ratios = model.hybrid_attention_ratio, model.hybrid_mlp_ratio
    return _by_ratios(model.config.num_layers, *ratios, model.hybrid_override_pattern)


@cache
def _by_ratios(*sizes: Any) -> str:
    from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

    return "".join(allocate_layers(*sizes))
