"""Two halves of a micro-batch in turns through the layers of a stage, after DistCA (arXiv 2510.18121).

    first half   layer 1 |         | layer 2 |         | ...
    second half          | layer 1 |         | layer 2 | ...      on a stream of its own each

The host asks for the layers alternately. Each stream waits for its own reductions of tensor parallelism and messages of
a CP group alone, so that while one half's activations travel, the device computes the other half; whichever of them
comes to its travel first is ahead by that from then on, so nothing sets the pace. Autograd runs each half backward on
the stream of its forward, the later layer first and of a layer the second half first: mirrored, in one order on all
ranks. Without CUDA all of it runs on the spot, in that order.

Embedding, last norm, output layer and loss see the micro-batch as one. Where the second half continues a sequence of the
first, it attends to the keys that this one has left in the store: forward it follows a layer behind, and backward the
first follows it, since it takes the gradients of these keys.

Shape legend: T = slots of the pack, C = hidden size, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn

from .attention import PlannedSeqParams, seq_params

Stream = torch.cuda.Stream | None
"""None without CUDA."""


def take_turns(model: nn.Module) -> nn.Module:
    """Let the halves of packs that have any take turns in the layers of a GPTModel; returns the model."""
    block: Any = model.decoder
    block.forward = partial(_forward, block, block.forward)
    return model


def _forward(block: Any, stock: Callable[..., Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    params = kwargs.get("packed_seq_params")
    if not (isinstance(params, PlannedSeqParams) and params.pack and params.pack.halves):
        return stock(hidden_states, *args, **kwargs)
    hidden_T1C = _in_turns(block, hidden_states, params, kwargs["rotary_pos_emb"])
    return hidden_T1C if block.final_layernorm is None else block.final_layernorm(hidden_T1C)


def _in_turns(block: Any, hidden_T1C: Tensor, params: PlannedSeqParams, rotary_T11D: Tensor) -> Tensor:
    assert params.pack is not None
    packs, streams = params.pack.halves, _streams(hidden_T1C.device)
    sizes = [pack.num_padded_tokens for pack in packs]
    halves = [seq_params(pack, routing=params.routing) for pack in packs]
    parts, rotary = list(torch.split(hidden_T1C, sizes)), torch.split(rotary_T11D, sizes)
    for stream, *tensors in zip(streams, parts, rotary, strict=True):
        _begin(stream, tensors)
    first, second = ({piece.sequence for piece in pack.slices} for pack in packs)
    tied, recomputed = not first.isdisjoint(second), _recomputed_layers(block)
    for number, layer in enumerate(block.layers):
        for place, stream in enumerate(streams):
            with _on(stream):
                if tied and place and stream is not None:
                    stream.wait_stream(streams[0])
                run = partial(_run_layer, layer, halves[place], rotary[place])
                again = number < recomputed
                parts[place] = tensor_parallel.checkpoint(run, False, parts[place]) if again else run(parts[place])
                if tied and not place and stream is not None:
                    parts[0] = _BehindOther.apply(parts[0], streams[1])  # type: ignore[no-untyped-call]
    for stream, part in zip(streams, parts, strict=True):
        _end(stream, part)
    return torch.cat(parts)


def _run_layer(layer: Any, params: PlannedSeqParams, rotary_T11D: Tensor, hidden_T1C: Tensor) -> Tensor:
    output: Tensor = layer(
        hidden_states=hidden_T1C, attention_mask=None, rotary_pos_emb=rotary_T11D, packed_seq_params=params
    )[0]
    return output


def _recomputed_layers(block: Any) -> int:
    """How many of its layers, the first ones, run again in backward."""
    config = block.config
    if config.recompute_granularity != "full" or not block.training:
        return 0
    return int(config.recompute_num_layers) if config.recompute_method == "block" else len(block.layers)


class _BehindOther(torch.autograd.Function):
    """Leaves the first half as it is; what its backward asks for comes behind all that the other half's has."""

    @staticmethod
    def forward(ctx: Any, hidden_T1C: Tensor, other: torch.cuda.Stream) -> Tensor:
        ctx.other = other
        return hidden_T1C.view_as(hidden_T1C)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        torch.cuda.current_stream().wait_stream(ctx.other)
        return gradient, None


@cache
def _streams(device: torch.device) -> tuple[Stream, Stream]:
    return (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else (None, None)


def _on(stream: Stream) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _begin(stream: Stream, tensors: list[Tensor]) -> None:
    """The stream goes on from here with tensors of the current one."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
        for tensor in tensors:
            tensor.record_stream(stream)


def _end(stream: Stream, part: Tensor) -> None:
    """The current stream goes on with what the other one has computed."""
    if stream is not None:
        current = torch.cuda.current_stream()
        current.wait_stream(stream)
        part.record_stream(current)
