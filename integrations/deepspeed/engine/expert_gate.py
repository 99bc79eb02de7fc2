"""Count headers, marks, loads and copies (`runtime.experts`) at the experts of an engine's model.

AutoEP's own exchange of counts tells a rank what comes to it, and nothing of what the others send each other: counts
and headers of a group are gathered before it, in a message of 5 + 2 E numbers a layer. What a plan's planner of layers
makes of them, the layer runs (`expert_slots`). Where every rank has all experts, Transformers' blocks give them the
choices, which are counted.

Shape legend: T = slots of a row, E = experts, K = experts of a token.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....runtime.attention.pack import Pack
from ....runtime.experts.balance import Shares
from ....runtime.experts.gate import ExpertGate
from ....runtime.experts.routing import Routed
from ....runtime.stage.offload import layers_of
from ...huggingface.routes import blocks, num_experts_of
from .expert_slots import SlottedLayer
from .experts import AutoEPMoELayer


class GatedExperts:
    """The gate of all layers of a model that have experts.

    Args:
        group: the ranks that divide them; None: this rank has all.
    """

    def __init__(self, model: nn.Module, group: Any = None) -> None:
        ranks = (dist.get_rank(),) if group is None else tuple(dist.get_process_group_ranks(group))
        self.gate = ExpertGate(ranks, ranks.index(dist.get_rank()))
        self.pack: Pack | None = None
        """Whose forward runs. None in backwards: what they run again has been recorded."""
        self._group, self._num_experts = group, num_experts_of(model)
        self._undo = ExitStack()
        decoder_layers = layers_of(model)
        for number, block in blocks(model):
            self._undo.callback(self.gate.mark_around(block, number))
            self._bind(number, block, decoder_layers[number])

    def unbind(self) -> None:
        """Leave the model as it was."""
        self._undo.close()

    def _bind(self, number: int, block: Any, decoder_layer: Any) -> None:
        """Look at the choices of a block between its router and its experts."""

        def handed(_: Any, inputs: tuple[Tensor, ...]) -> None:
            if len(inputs) > 1:  # the experts of Llama 4 get tokens alone
                self._record(number, inputs[1])

        def shares_of(chosen_TK: Tensor) -> Shares | None:
            return self._shares(number, chosen_TK)

        def recomputed() -> bool:
            return self.pack is None or getattr(decoder_layer, "gradient_checkpointing", False)

        if isinstance(block, AutoEPMoELayer):
            self._undo.callback(SlottedLayer(block, shares_of, recomputed).bind())
        else:
            self._undo.callback(block.experts.register_forward_pre_hook(handed).remove)

    def _shares(self, number: int, chosen_TK: Tensor) -> Shares | None:
        """Whose experts run where in the pass; the ranks of the group tell each other their counts."""
        if self.pack is None and not torch.is_grad_enabled():
            return None  # a forward of no plan: somebody evaluates
        record = self.pack is not None and torch.is_grad_enabled()
        sent_E = torch.bincount(chosen_TK.flatten(), minlength=self._num_experts)
        counted_E = torch.zeros_like(sent_E) if self.pack is None else self._counted(self.pack, number, chosen_TK)
        counts = self.gate.with_header(number, sent_E, counted_E)
        rows = [torch.empty_like(counts) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, counts, group=self._group)
        return self.gate.shares(number, self.gate.checked_counts(torch.stack(rows), record=record), record=record)

    def _record(self, number: int, chosen_TK: Tensor) -> None:
        if self.pack is not None and torch.is_grad_enabled():
            self.gate.record(number, self._counted(self.pack, number, chosen_TK)[None])

    def _counted(self, pack: Pack, number: int, chosen_TK: Tensor) -> Tensor:
        return Routed(pack, number, chosen_TK, self._num_experts).counts()
