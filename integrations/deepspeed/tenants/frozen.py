"""A frozen Hugging Face model in DeepSpeed's engine, without an optimizer, and its linear layers as adapters see them.

    ZeRO 0, 1, 2    nothing is left that they divide or reduce: the engine puts the model on its device, and that is
                    all it does; it is made with ZeRO 0, as 1 and 2 refuse to stand without an optimizer
    ZeRO 3          the engine divides the frozen weights, and gathers and releases them in every pass
    pipelines       the engine gives the stages their layers and their process groups

Passes with a backward call the engine's module, and autograd itself: the engine's own forward and backward count what
an optimizer will do, and refuse to run without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ....core.errors import EvenloadError
from ....core.recipe.recipe import Recipe
from ....runtime.adapters.places import AdaptedBlock, Place, Site
from ....runtime.attention.pack import Pack
from ...huggingface import attention
from ..engine.ds_config import SHARDED, ds_config
from ..engine.engine import prepare_deepspeed

_ATTENTION = ("self_attn", "attention")
"""What the models that evenload knows call the attention of a layer."""


def frozen_engine(model: nn.Module, recipe: Recipe, world_size: int) -> Any:
    """A `DeepSpeedEngine` around a model whose parameters get no gradients. Collective; needs a process group."""
    prepare_deepspeed()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    config = ds_config(recipe, world_size)
    if recipe.deepspeed.zero_stage != SHARDED:
        config["zero_optimization"] = {"stage": 0}
        if recipe.train.dtype == "bf16":
            # DeepSpeed's own bfloat16 comes with an optimizer; buffers keep their precision there, too.
            config["bf16"] = {"enabled": False}
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def blocks_of(layers: Sequence[nn.Module], names: Mapping[int, str]) -> list[AdaptedBlock]:
    """Decoder layers as adapters see them: every linear layer inside, under its Hugging Face name.

    ``names``: of all modules that are linear layers, by id. Raises EvenloadError for layers of another build.
    """
    return [AdaptedBlock(_carrier(layer), _pack_of, tuple(_sites(layer, names))) for layer in layers]


def linear_names(model: nn.Module) -> dict[int, str]:
    """Module paths of all linear layers of a model, by id."""
    return {id(module): name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def need_gradient(_: Any, __: Any, output: Tensor) -> Tensor:
    """Hook of an embedding: what it gives needs a gradient, so that every pack has a backward, one of no tenant too,
    and ZeRO 3 counts the same inputs in every pass."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


def replay_first(layers: Sequence[Any]) -> None:
    """Let the backward of a recomputed layer begin with its replay, and the replay run to the layer's end.

    Else it begins with the first backward that asks for an activation, which may be an adapter's: ranks whose packs are
    of other tenants would gather the weights of ZeRO 3 in other orders, and wait for each other for ever. `layers` can
    recompute already.
    """
    for layer in layers:
        layer._gradient_checkpointing_func = partial(_marked, layer._gradient_checkpointing_func)


def _marked(checkpoint: Any, forward: Any, *arguments: Any) -> Any:
    ask: Any = _Asking.apply
    return checkpoint(lambda *inner: ask(forward(*inner)), *arguments)


class _Asking(torch.autograd.Function):
    """Changes nothing; its backward asks for an activation of the checkpoint that it runs in."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 1
        return gradient


def _carrier(layer: nn.Module) -> nn.Module:
    """The attention of a layer: the pack is an argument of its call, and it runs first in every replay. The layer's own
    hooks are no use: Transformers replays a layer's ``forward``, not its call."""
    replaying = [name for name, module in layer.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = [name for name in replaying if name]
    attentions = [module for name in _ATTENTION if isinstance(module := getattr(layer, name, None), nn.Module)]
    if inner or not attentions:
        what = "adapters do not know which tenants run in the layers of this model"
        detail = f"{type(layer).__name__}.{inner[0]} recomputes itself" if inner else f"{type(layer).__name__}"
        raise EvenloadError(what, detail, f"use a model whose layers recompute as a whole, with {_ATTENTION[0]}")
    return attentions[0]


def _sites(layer: nn.Module, names: Mapping[int, str]) -> Iterator[Site]:
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            # Not the weight's shape: under ZeRO 3 a rank holds a part.
            outputs, inputs = module.out_features, module.in_features
            yield Site(module, (Place(names[id(module)], outputs, inputs, (0, outputs), (0, inputs)),))


def _pack_of(_: tuple[Any, ...], words: dict[str, Any]) -> Pack:
    pack: Pack = words[attention.PACK]
    return pack
