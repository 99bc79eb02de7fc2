"""The choices that the routers of a Hugging Face model make, seen as they are made, or made by somebody else.

Every block with experts chooses by ``torch.topk`` of its scores, [T, E] to [T, K]: those of Transformers, and the
layers that DeepSpeed's AutoEP puts in their place. Scores of another choice are read off at its experts, so that
gradients flow as they would have.

Shape legend: T = slots of a row, L = tokens of a sequence, E = experts, K = experts of a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...core.recipe.sizes import NUM_EXPERTS
from ...runtime.attention.pack import Pack
from ...runtime.experts.routing import UNKNOWN, Routes, StepRouting

Choose = Callable[[int, Tensor], Tensor]
"""Layer from 0 and the router's own choice [T, K] to the experts that are taken."""


def watch(model: torch.nn.Module, choose: Choose) -> None:
    """Ask ``choose`` at every choice of every router of a model from now on."""
    num_experts = num_experts_of(model)
    for layer, block in blocks(model):
        block.forward = partial(_watched, block.forward, partial(choose, layer), num_experts)


def num_experts_of(model: torch.nn.Module) -> int:
    """Experts of each layer of a model that has any; 0: none has."""
    config: Any = model.config
    text = config.get_text_config()
    return next((int(n) for name in NUM_EXPERTS if (n := getattr(text, name, None))), 0)


def _watched(forward: Any, choose: Callable[[Tensor], Tensor], num_experts: int, /, *args: Any, **kwargs: Any) -> Any:
    with _Choices(choose, num_experts):
        return forward(*args, **kwargs)


def blocks(model: torch.nn.Module) -> Iterator[tuple[int, Any]]:
    """The blocks with experts, with the numbers of their layers from 0."""
    for name, module in model.named_modules():
        number = re.search(r"\.layers\.(\d+)\.", f"{name}.")
        if number and hasattr(module, "experts") and (hasattr(module, "gate") or hasattr(module, "router")):
            yield int(number[1]), module


class _Choices(TorchFunctionMode):
    def __init__(self, choose: Callable[[Tensor], Tensor], num_experts: int) -> None:
        super().__init__()
        self._choose = choose
        self._num_experts = num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Choices among groups of experts come before, and are narrower.
        if func not in (torch.topk, Tensor.topk) or args[0].shape[1:] != (self._num_experts,):
            return result
        chosen_TK = self._choose(result.indices)
        return result if chosen_TK is result.indices else type(result)((args[0].gather(-1, chosen_TK), chosen_TK))


class Recorder:
    """Records the choices of a planned run, by layer, sequence and place, while a step is recorded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.step: StepRouting | None = None
        self.pack: Pack | None = None
        """Whose forward runs. None in backwards: what they run again has been recorded."""
        watch(model, self._choose)

    def _choose(self, layer: int, own_TK: Tensor) -> Tensor:
        if self.step is not None and self.pack is not None:
            self.step.record(self.pack, layer, own_TK)
        return own_TK


class Replayer:
    """Sends tokens of whole sequences where `routes` says, and counts those that would have gone elsewhere."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.routes: Routes = {}
        self.sequence = 0
        """Which one runs."""
        self.differ = 0
        watch(model, self._choose)

    def _choose(self, layer: int, own_LK: Tensor) -> Tensor:
        recorded = self.routes.get((layer, self.sequence))
        if recorded is None:
            return own_LK
        recorded_LK = recorded[: len(own_LK)].to(own_LK.device).long()
        assert int(recorded_LK.min()) > UNKNOWN, f"layer {layer}: a token of sequence {self.sequence} had no forward"
        self.differ += int((recorded_LK.sort().values != own_LK.sort().values).any(dim=1).sum())
        return recorded_LK
