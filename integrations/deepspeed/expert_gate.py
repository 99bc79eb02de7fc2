"""Seals, marks and loads (`runtime.experts.gate`) at the experts of an engine's model.

AutoEP's own exchange of counts tells a rank what comes to it, and nothing of what the others send each other: counts
and seals of a group are gathered before it, in a message of 4 + 2 E numbers a layer. Where every rank has all experts,
Transformers' blocks give them the choices, which are counted.

Shape legend: T = slots of a row, E = experts, K = experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import Tensor, nn

from ...runtime.attention.pack import Pack
from ...runtime.experts.gate import ExpertGate
from ...runtime.experts.routing import Routed
from ..huggingface.routes import blocks, num_experts_of


class GatedExperts:
    """The gate of all layers of a model that have experts.

    Args:
        group: the ranks that divide them; None: this rank has all.
    """

    def __init__(self, model: nn.Module, group: Any = None) -> None:
        ranks = (dist.get_rank(),) if group is None else tuple(dist.get_process_group_ranks(group))
        self.gate = ExpertGate(ranks, ranks.index(dist.get_rank()))
        self.pack: Pack | None = None
        """Whose forward runs. None in backwards: what they run again has been booked."""
        self._group, self._num_experts = group, num_experts_of(model)
        for layer, block in blocks(model):
            self.gate.mark_around(block, layer)
            self._bind(layer, block)

    def _bind(self, layer: int, block: Any) -> None:
        """Look at the choices of a block between its router and its experts."""

        def routed(_: Any, __: Any, outputs: tuple[Tensor, ...]) -> None:
            self._seal(layer, outputs[1])

        def handed(_: Any, inputs: tuple[Tensor, ...]) -> None:
            if len(inputs) > 1:  # the experts of Llama 4 get tokens alone
                self._book(layer, inputs[1])

        if isinstance(block, AutoEPMoELayer):
            block.router.register_forward_hook(routed)
        else:
            block.experts.register_forward_pre_hook(handed)

    def _seal(self, layer: int, chosen_TK: Tensor) -> None:
        sent_E = torch.bincount(chosen_TK.flatten(), minlength=self._num_experts)
        counted_E = torch.zeros_like(sent_E) if self.pack is None else self._counted(self.pack, layer, chosen_TK)
        sealed = self.gate.sealed(layer, sent_E, counted_E)
        rows = [torch.empty_like(sealed) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, sealed, group=self._group)
        self.gate.opened(torch.stack(rows), book=self.pack is not None and torch.is_grad_enabled())

    def _book(self, layer: int, chosen_TK: Tensor) -> None:
        if self.pack is not None and torch.is_grad_enabled():
            self.gate.book(layer, self._counted(self.pack, layer, chosen_TK)[None])

    def _counted(self, pack: Pack, layer: int, chosen_TK: Tensor) -> Tensor:
        return Routed(pack, layer, chosen_TK, self._num_experts).counts()
