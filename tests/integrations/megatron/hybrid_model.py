"""Megatron-Core's hybrid model with layers of its local spec, in whichever version is installed."""

from __future__ import annotations

import inspect
from typing import Any
from unittest.mock import patch

import torch
from evenload.integrations.megatron.base.families import HybridModel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

try:
    from megatron.core.models.hybrid import hybrid_block as block
    from megatron.core.models.hybrid.hybrid_block import HybridStack as Stack
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules as StackSubmodules
    from megatron.core.transformer.transformer_layer import MoETransformerLayer as ExpertLayer
except ImportError:
    from megatron.core.ssm import mamba_block as block
    from megatron.core.ssm.mamba_block import MambaStack as Stack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as StackSubmodules

    ExpertLayer = TransformerLayer

_NAMES = inspect.signature(HybridModel.__init__).parameters
_SPEC = next(name for name in ("hybrid_stack_spec", "mamba_stack_spec") if name in _NAMES)
_PATTERN = next(name for name in ("hybrid_layer_pattern", "hybrid_override_pattern") if name in _NAMES)


class Recurrence(torch.nn.Module):
    """In the place of Mamba's mixer, whose kernels need CUDA: a state that each token decays and adds to."""

    def __init__(self, config: Any, d_model: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(d_model, d_model, dtype=config.params_dtype))
        config.init_method(self.weight)

    def forward(self, x_TBC: torch.Tensor, packed_seq_params: Any = None, **_: Any) -> tuple[torch.Tensor, None]:
        assert packed_seq_params is None, "a mixer is given packs"
        states = [torch.zeros_like(x_TBC[0])]
        for added in torch.tanh(x_TBC @ self.weight):
            states.append(0.9 * states[-1] + added)
        return torch.stack(states[1:]), None


def hybrid_model(pattern: str, *, config: Any, transformer_layer_spec: Any, **rest: Any) -> Any:
    """The hybrid model with that pattern of layers, built as GPTModel is."""
    given, dense = transformer_layer_spec.submodules, get_gpt_layer_local_spec().submodules
    norm = given.input_layernorm
    attention = TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=given.self_attention, self_attn_bda=get_bias_dropout_add
    )
    mlps = [
        TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=spec.mlp, mlp_bda=get_bias_dropout_add)
        for spec in (dense, given)
    ]
    mamba = MambaLayerSubmodules(norm=norm, mixer=Recurrence, mamba_bda=get_bias_dropout_add)
    layers = StackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(MLPLayer, submodules=mlps[0]),
        moe_layer=ModuleSpec(ExpertLayer, submodules=mlps[1]),
    )
    with patch.object(block, "TENorm", WrappedTorchNorm):
        return HybridModel(config=config, **{_SPEC: ModuleSpec(Stack, submodules=layers), _PATTERN: pattern}, **rest)
