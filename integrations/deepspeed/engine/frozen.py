"""Passes through a model whose weights are frozen, and the linear layers that can have adapters.

Passes with a backward call the engine's module, and autograd itself: the engine's own forward and backward count what
an optimizer will do, and refuse to run without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ....core.errors import EvenloadError
from ....runtime.adapters.places import AdaptedBlock, Place, Site
from ....runtime.attention.pack import Pack
from ....runtime.attributes import with_attributes
from ....runtime.stage.executor import Graph
from ...host.scoring import LossCollector, evaluating
from ...host.step import Step
from ...host.trained import without_gradients
from ...huggingface import attention
from .engine import Releases
from .engine_host import EngineHost
from .stage import EngineStage, call_of

_ATTENTION = ("self_attn", "attention")
"""What the models that evenload knows call the attention of a layer."""


class FrozenStage(EngineStage):
    """The passes of a frozen model; the collector takes their losses down."""

    def __init__(self, host: EngineHost, step: Step, collector: LossCollector) -> None:
        self._releases = Releases(host.engine.module)
        super().__init__(host, step, self._releases, None, None, weight=1.0, collector=collector)
        optimizer = host.engine.optimizer
        # Of ZeRO 3 it is what gathers weights, where nothing is trained, or has that inside.
        gatherer = getattr(optimizer, "parameter_offload", optimizer)
        self._release = getattr(gatherer, "release_backward_leftovers", lambda: None)

    def _logits_of(self, pack: Pack) -> Tensor:
        logits_TV: Tensor = self._engine.module(**call_of(pack)).logits[0]
        return logits_TV

    def backward(self, graph: Graph, gradient: Tensor | None) -> None:
        self._releases.before_backward()
        torch.autograd.backward(graph.output)
        self._release()


@contextmanager
def frozen(model: nn.Module, entrance: nn.Module | None, layers: Sequence[Any] = ()) -> Iterator[None]:
    """Inside, a model has no gradients and drops nothing, and every pack has a backward.

    Args:
        entrance: the embedding, where this rank has it.
        layers: those that recompute, if their backward must begin with the replay (`replay_first`).
    """
    hook = entrance.register_forward_hook(need_gradient) if entrance is not None else None
    with ExitStack() as stack:
        stack.enter_context(without_gradients(model))
        for module in model.modules():
            if type(module).__name__.startswith("Dropout"):
                stack.enter_context(evaluating(module))
        for layer in layers:
            own = layer._gradient_checkpointing_func
            stack.enter_context(with_attributes(layer, _gradient_checkpointing_func=own))
        replay_first(layers)
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()


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
