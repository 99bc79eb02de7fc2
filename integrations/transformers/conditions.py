"""What a proof runs under: embeddings as leaves, attention that is counted, no dropout, a copy of the Trainer that
counts for itself, and nothing left behind."""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ...core.errors import EvenloadError
from ...runtime.attributes import with_attributes
from ..huggingface import attention
from ..huggingface.models import rotary_reach

_SMALL = 1000
"""Entries of a container that is copied."""
_MOVED = 1 << 20
"""Entries of weights that are moved at least, where there are so many: small weights first, which are copied."""
_STEP = 0.1
"""How far, over the mean size of a weight's entries; for one of zeros, a fifth of this itself."""

UNREACHED = "attention that packs do not reach: the model does not leave it to Transformers' AttentionInterface"


@contextmanager
def embedded(model: Any) -> Iterator[list[Tensor]]:
    """Inside, the embeddings of the tokens are leaves of the graph; gives them as they come into being. Forwards that
    have no graph, which metrics take, have none."""
    leaves: list[Tensor] = []

    def cut(module: Any, args: Any, output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    table = model.get_input_embeddings()
    # An encoder and a decoder may have modules of their own for one table, and PEFT puts its own around one.
    weight = getattr(table, "weight", None)
    others = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m.weight is weight]
    inner = {part for module in {table, *others} for part in module.modules() if part is not module}
    hooks = [module.register_forward_hook(cut) for module in {table, *others} - inner]
    try:
        yield leaves
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def counted(model: Any, entered: Any, planned: bool) -> Iterator[dict[str, int]]:
    """Inside, a planned model attends inside packs; counts its forwards, those of them that have come to their end, its
    calls of packed attention, those in a window, those that are not told of the window that their mask has, and the
    positions that its rotary tables reach. ``entered``: the module whose call is its forward."""
    calls = {"attention": 0, "windows": 0, "untold": 0, "forwards": 0, "ended": 0, "positions": 0}

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls["attention"] += 1
        if attention.PACK not in kwargs:
            raise EvenloadError(
                UNREACHED, f"{type(args[0]).__name__} hands no keyword arguments of the model's call on"
            )
        module, query, key, value, *rest = args
        mask = rest[0] if rest else kwargs.pop("attention_mask", None)
        if isinstance(mask, LocalMask):
            calls["windows"] += 1
            calls["untold"] += kwargs.get("sliding_window") != mask.size
            mask = None
        return attention.attention(module, query, key, value, mask, **kwargs)

    def count(what: str, *_: Any) -> None:
        calls[what] += 1

    def reach(module: Any, args: Any, kwargs: Any) -> None:
        positions = args[1] if len(args) > 1 else kwargs["position_ids"]
        calls["positions"] = max(calls["positions"], int(positions.max()) + 1)

    hooks = [
        entered.register_forward_pre_hook(partial(count, "forwards")),
        entered.register_forward_hook(partial(count, "ended")),
    ]
    if rotary_reach(model.config.get_text_config()) is not None:
        rotary = (module for module in model.modules() if hasattr(module, "rope_type"))
        hooks += [module.register_forward_pre_hook(reach, with_kwargs=True) for module in rotary]
    stock = ""
    # What stands there is the session's own, or nothing where no session is on.
    before = AttentionInterface._global_mapping.get(attention.NAME)
    try:
        if planned:
            AttentionInterface.register(attention.NAME, counting)
            AttentionMaskInterface.register(attention.NAME, _local_mask)
            stock = attention.set_attention(model, attention.NAME)
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
        if planned:
            attention.set_attention(model, stock)
            attention.unregister()
            AttentionMaskInterface._global_mapping.pop(attention.NAME, None)
            if before is not None:
                AttentionInterface.register(attention.NAME, before)


def drawn_outside_torch() -> tuple[Any, bytes]:
    """Where Python's and numpy's generators stand; another value: something has drawn from them."""
    return random.getstate(), pickle.dumps(np.random.get_state())


class LocalMask(NamedTuple):
    """What a model's layers are given for a mask in which a query sees so many tokens at most."""

    size: int


def _local_mask(*_: Any, local_size: int | None = None, **__: Any) -> LocalMask | None:
    """Transformers' interface for masks, of which a pack needs none."""
    return None if local_size is None else LocalMask(local_size)


class _WithoutDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and "dropout_p" in (kwargs or {}):
            kwargs = {**kwargs, "dropout_p": 0.0}
        if func in (torch.nn.functional.dropout, torch.dropout, torch.dropout_):
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


@contextmanager
def as_if_without_dropout(model: Any, device: torch.device) -> Iterator[Callable[[], str | None]]:
    """Inside, the model trains, drops nothing, and recomputes no layer: PyTorch's older checkpoints give no gradient at
    an activation. Gives what names a buffer that has changed. Afterwards its mode and its buffers are what they were,
    and random numbers go on as if nothing had been drawn."""
    buffers = [(name, buffer, buffer.clone()) for name, buffer in model.named_buffers()]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    checkpointed = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        for module in checkpointed:
            stack.enter_context(with_attributes(module, gradient_checkpointing=False))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(_WithoutDropout())
        model.train()
        try:
            yield lambda: next((name for name, buffer, value in buffers if not torch.equal(buffer, value)), None)
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            for module, mode in modes:
                module.training = mode
            for _, buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def moved(model: Any, side: float) -> Iterator[None]:
    """Inside, weights that are trained lie a little to one side of where they are."""
    _reshard(model)  # else what is moved may be a copy of a forward before, which is freed meanwhile
    trained = sorted((p for p in model.parameters() if p.requires_grad), key=lambda p: p.numel())
    kept: list[tuple[Tensor, Tensor]] = []
    entries = 0
    with torch.no_grad():
        for parameter in trained:
            if entries >= _MOVED:
                break
            own: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
            kept.append((own, own.clone()))
            entries += own.numel()
            size = _STEP * float(own.abs().mean()) if own.numel() else 0.0
            waves = torch.arange(own.numel(), device=own.device).sin().view(own.shape)
            own.add_(side * (size or _STEP / 5) * waves.to(own.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for own, value in kept:
                own.copy_(value)
        _reshard(model)  # else the next forward may take a copy of what was moved


def _reshard(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def twin_of(trainer: Any) -> Any:
    """A copy of a Trainer with counters of its own."""
    twin = copy.copy(trainer)
    for name, value in vars(trainer).items():
        if _is_plain(value):
            setattr(twin, name, copy.deepcopy(value))
    twin.state = copy.deepcopy(trainer.state)  # Axolotl counts tokens there
    twin.log = lambda *_, **__: None
    return twin


def _is_plain(value: Any) -> bool:
    """Whether it is a number, a text, or a small container of such: metrics, not data."""
    if isinstance(value, (dict, list, tuple, set, deque)):
        inner = value.values() if isinstance(value, dict) else value
        return len(value) <= _SMALL and all(map(_is_plain, inner))
    return value is None or isinstance(value, (bool, int, float, str))
