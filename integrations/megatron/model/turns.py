"""Two halves of a micro-batch in turns through the layers of a stage, after DistCA (arXiv 2510.18121).

    first half    attention  ~~~~~~  MLP        ~~~~~~     attention   ~ its reduction, or what a CP group sends
    second half              attention  ~~~~~~  MLP        ~~~~~~

Each half has a stream of its own, and the host asks for attention and MLP of both alternately. So the reductions of
tensor parallelism, which run in the order of asking, come in that order too, and while one half's activations travel
the device computes the other half. Autograd runs each node backward on the stream of its forward, the latest first:
mirrored, in one order on all ranks. Without CUDA all of it runs on the spot, in the same order.

Embedding, last norm, output layer and loss see the micro-batch as one. Where the second half continues a sequence of
the first it attends to the keys that this one has left in the store, which has them wait for each other
(`runtime.attention.prefix`). A layer that is recomputed is one checkpoint of both halves.

With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` a device takes work in the order of asking, so that a half which waits for its
reduction holds the other up where it is asked first; leave the variable out.

Shape legend: T = slots of the pack, C = hidden size, D = head dimension.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn

from .attention import PlannedSeqParams, seq_params

log = logging.getLogger("evenload")

Stream = torch.cuda.Stream | None
"""None without CUDA."""


class _Half(NamedTuple):
    """What the layers of a half ask for beside its hidden states."""

    params: PlannedSeqParams
    rotary_T11D: Tensor
    stream: Stream

    def running(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


def take_turns(model: nn.Module) -> nn.Module:
    """Let the halves of packs that have any take turns in the layers of a GPTModel; returns the model."""
    block: Any = model.decoder
    block.forward = partial(_forward, block, block.forward)
    return model


def _forward(block: Any, stock: Callable[..., Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    params = kwargs.get("packed_seq_params")
    if not (isinstance(params, PlannedSeqParams) and params.pack and params.pack.halves):
        return stock(hidden_states, *args, **kwargs)
    sizes = [pack.num_padded_tokens for pack in params.pack.halves]
    parts, rotary = (torch.split(x, sizes) for x in (hidden_states, kwargs["rotary_pos_emb"]))
    each = zip(params.pack.halves, rotary, _streams(hidden_states.device), strict=True)
    halves = [_Half(seq_params(pack, routing=params.routing), angles, stream) for pack, angles, stream in each]
    _go_on_from_here(halves)
    for number, layer in enumerate(block.layers):
        run = partial(_run_layer, layer, halves)
        again = number < _recomputed_layers(block)
        parts = tensor_parallel.checkpoint(partial(_run_again, run, halves), False, *parts) if again else run(*parts)
    for half in halves:
        if half.stream is not None:
            torch.cuda.current_stream().wait_stream(half.stream)
    output: Tensor = block.final_layernorm(torch.cat(parts))
    return output


def _go_on_from_here(halves: Sequence[_Half]) -> None:
    """Let the streams of halves begin behind what was asked of the current one."""
    for half in halves:
        if half.stream is not None:
            half.stream.wait_stream(torch.cuda.current_stream())


def _run_again(
    run: Callable[..., tuple[Tensor, ...]], halves: Sequence[_Half], *parts_T1C: Tensor
) -> tuple[Tensor, ...]:
    """A layer that is recomputed in backward, where the current stream may still read what halves have made before."""
    _go_on_from_here(halves)
    return run(*parts_T1C)


def _run_layer(layer: Any, halves: Sequence[_Half], *parts_T1C: Tensor) -> tuple[Tensor, ...]:
    parts = list(parts_T1C)
    for place, half in enumerate(halves):
        with half.running():
            parts[place], _ = layer._forward_attention(
                parts[place],
                attention_mask=None,
                rotary_pos_emb=half.rotary_T11D,
                packed_seq_params=half.params,
            )
    for place, half in enumerate(halves):
        with half.running():
            parts[place] = layer._forward_mlp(parts[place])
    return tuple(parts)


def _recomputed_layers(block: Any) -> int:
    """How many of its layers, the first ones, run again in backward."""
    config = block.config
    if config.recompute_granularity != "full" or not block.training:
        return 0
    return int(config.recompute_num_layers) if config.recompute_method == "block" else len(block.layers)


@cache
def _streams(device: torch.device) -> tuple[Stream, Stream]:
    if device.type != "cuda":
        return None, None
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        log.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=1: halves of micro-batches hide less of each other's traffic; unset it"
        )
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
