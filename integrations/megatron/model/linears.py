"""Megatron's linear layers may leave their weight gradients for later (`runtime.stage.deferred`).

Column- and row-parallel layers of the decoder call ``_forward_impl`` for their product; while a plan with W passes
runs, each of them has one of its own, which takes over in passes that are split. Everything around the product
(gathers, reductions, biases) is Megatron's. Output layer, embedding, norms and biases get their gradients in the
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import Router
from torch import Tensor, nn

from ....core.errors import EvenloadError
from ....runtime.stage.deferred import WgradStore, replaced
from ....runtime.stage.offload import layers_of
from .sharded_experts import ShardedExperts


@contextmanager
def deferring_wgrads(gpt: Any, later: WgradStore) -> Iterator[None]:
    """The linear layers of the decoder can leave their weight gradients to ``later``. Raises EvenloadError for layers
    that cannot (see `why_in_backward`), and where someone else has changed them."""
    reason = why_in_backward(gpt)
    if reason:
        raise EvenloadError(
            "the plan splits backwards, and this model's layers compute weight gradients in the backward only",
            reason,
            "set plugins.pipeline.split_backward=off",
        )
    with ExitStack() as undo:
        for module in linears_of(gpt):
            undo.enter_context(replaced(module, "_forward_impl", _product(module, later)))
        yield


def why_in_backward(gpt: Any) -> str:
    """What keeps the weight gradients of a GPTModel's decoder in its backward; empty if nothing does."""
    if gpt.config.gradient_accumulation_fusion:
        return "gradient_accumulation_fusion: a kernel of its own adds up weight gradients"
    if gpt.config.sequence_parallel and gpt.config.tensor_model_parallel_size > 1:
        return "sequence_parallel: the inputs of linear layers are not kept whole"
    known = {id(module.weight) for module in linears_of(gpt)}
    # Routers and experts have theirs in the backward: the exchange of its tokens is there.
    with_exchange = [m for m in gpt.modules() if isinstance(m, (Router, SequentialMLP, ShardedExperts))]
    known |= {id(weight) for module in with_exchange for weight in module.parameters()}
    for number, layer in enumerate(layers_of(gpt)):
        odd = [name for name, weight in layer.named_parameters() if weight.dim() > 1 and id(weight) not in known]
        if odd:
            return f"{odd[0]} of layer {number} is in no column- or row-parallel layer of Megatron-Core"
    return ""


def linears_of(gpt: Any) -> list[nn.Module]:
    """The column- and row-parallel layers of a GPTModel's decoder, experts aside."""
    modules = (module for layer in layers_of(gpt) for module in layer.modules())
    return [m for m in modules if isinstance(m, (ColumnParallelLinear, RowParallelLinear)) and not m.is_expert]


def _product(module: Any, later: WgradStore) -> Callable[..., Tensor]:
    own: Callable[..., Tensor] = module._forward_impl

    def product(input: Tensor, weight: Tensor, bias: Tensor | None, **how: Any) -> Tensor:
        """Megatron's product of a layer, for the settings that `why_in_backward` lets by."""
        if not later.takes(input, weight):
            return own(input=input, weight=weight, bias=bias, **how)
        return later.linear(input, weight, bias, sum_over=how["tp_group"] if how["allreduce_dgrad"] else None)

    return product
