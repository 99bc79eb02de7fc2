"""Norms of layers whose tokens tensor-parallel ranks divide (Megatron's sequence parallelism).

Megatron's local spec has torch's norms, whose wrapper refuses that. They compute each token alone, so nothing stands
against it but that the gradient of a norm's weight is then a rank's part of the sum. Megatron adds the parts of marked
parameters up when it finalizes a step (`finalize_model_grads`), as it does for its fused norms.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import nn

from ....runtime.attributes import with_attributes


class DividedNorm:
    """Makes torch's norm for a rank's part of the tokens."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        with with_attributes(config, sequence_parallel=False):
            norm: nn.Module = WrappedTorchNorm(config, hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return norm


def dividing_tokens(spec: Any, config: Any, stage: int | None) -> Any:
    """A spec of a layer, or of all layers of a stage (None: this rank's), as one of all of them, torch's norms and the
    last one among them made for parts of the tokens."""
    if not isinstance(spec, TransformerBlockSubmodules):
        layers = get_num_layers_to_build(config, pp_rank=stage)
        spec = TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=LayerNormImpl)
    for layer in spec.layer_specs:
        for parts in (layer.submodules, layer.submodules.self_attention.submodules):
            for name, part in vars(parts).items():
                if part is WrappedTorchNorm:
                    setattr(parts, name, DividedNorm)
    if spec.layer_norm is WrappedTorchNorm:
        spec.layer_norm = DividedNorm
    return spec
