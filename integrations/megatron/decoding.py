"""The next tokens of packs by Megatron-Core's own model: logits of the wanted slots alone, of the whole vocabulary on
every tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from ...runtime.attention.pack import Pack
from ...runtime.experts.gate import ExpertGate
from ...runtime.experts.routing import StepRouting
from ...runtime.generate.engine import Decoder
from ...runtime.generate.quantized import LinearLayer
from ..host.generating import staged
from .model.attention import seq_params
from .model.linears import linears_of


@contextmanager
def decoder_of(called: Any, gpt: Any, device: torch.device, gate: ExpertGate | None) -> Iterator[Decoder]:
    """A decoder by the ``gpt`` of this pipeline stage, called as Megatron's wrappers have it, and the gate of its
    experts."""
    config, wanted = get_model_config(called), list[Tensor]()
    routing = StepRouting(np.zeros(0, dtype=np.int64))

    def choose(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_T1C, *rest = arguments
        return hidden_T1C[wanted[-1]], *rest

    def run(received: Tensor | None, pack: Pack, slots_R: Tensor) -> Tensor:
        wanted[:] = [slots_R]
        if gate:
            gate.begin_unplanned()
        if received is not None:
            gpt.set_input_tensor(received)
        tokens, positions = pack.tokens_T[None], pack.positions_T[None]
        params = seq_params(pack, routing=routing)
        output: Tensor = called(tokens, positions, None, packed_seq_params=params, runtime_gather_output=True)
        return output[0] if gpt.post_process else output

    def empty(pack: Pack) -> Tensor:
        return torch.empty(pack.num_padded_tokens, 1, config.hidden_size, dtype=config.pipeline_dtype, device=device)

    linears = [LinearLayer(module, "_forward_impl") for module in linears_of(gpt)]
    hook = gpt.output_layer.register_forward_pre_hook(choose) if gpt.post_process else None
    try:
        yield staged(run, device, parallel_state.get_pipeline_model_parallel_group(), empty, linears)
    finally:
        if hook is not None:
            hook.remove()
