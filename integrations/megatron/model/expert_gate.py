"""Seals and marks at Megatron-Core's MoE layers (`runtime.experts.gate`).

Megatron's alltoall dispatcher gathers the counts of a layer in its `preprocess`: what it gathers there carries the
seals, so nothing more is sent. The allgather dispatcher knows no counts; there they are gathered before it moves
tokens, which also finds packs of unlike length, in which torch would end the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor

from ....core.errors import RankError
from ....runtime.attributes import with_attributes
from ....runtime.experts.gate import ExpertGate
from ....runtime.experts.routing import is_token


def bind_gate(gpt: Any, gate: ExpertGate) -> None:
    """Let all layers of a GPTModel that have experts pass the gate."""
    for layer in gpt.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            gate.mark_around(layer.mlp, layer.layer_number - 1)
            dispatcher = layer.mlp.token_dispatcher
            if isinstance(dispatcher, MoEAllGatherTokenDispatcher):
                dispatcher.dispatch_preprocess = _gathering(layer, dispatcher, gate)
            else:
                dispatcher.preprocess = _sealing(layer, dispatcher, gate)


def _sealed(layer: Any, routing_map: Tensor, gate: ExpertGate) -> Tensor:
    counted_E = (routing_map & is_token(layer.mlp.router.pack)[:, None]).sum(dim=0)
    return gate.sealed(layer.layer_number - 1, routing_map.sum(dim=0), counted_E)


def _sealing(layer: Any, dispatcher: Any, gate: ExpertGate) -> Callable[[Tensor], Tensor]:
    """The `preprocess` of an alltoall dispatcher whose counts are sealed."""
    own, gather = dispatcher.preprocess, token_dispatcher.gather_from_sequence_parallel_region

    def preprocess(routing_map: Tensor) -> Tensor:
        sealed, book = _sealed(layer, routing_map, gate), torch.is_grad_enabled()
        if dispatcher.ep_size == 1:
            gate.opened(sealed[None], book=book)
            counts: Tensor = own(routing_map)
            return counts

        def gathered(_: Tensor, group: Any) -> Tensor:
            rows = gather(sealed, group=group).view(-1, len(sealed))
            return gate.opened(rows, book=book).flatten()

        with with_attributes(token_dispatcher, gather_from_sequence_parallel_region=gathered):
            counts = own(routing_map)
        return counts

    return preprocess


def _gathering(layer: Any, dispatcher: Any, gate: ExpertGate) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """The `dispatch_preprocess` of an allgather dispatcher, behind a gathering of sealed counts."""
    own, gather = dispatcher.dispatch_preprocess, token_dispatcher.gather_from_sequence_parallel_region

    def preprocess(hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        sealed = _sealed(layer, routing_map, gate)
        rows = gather(sealed, group=dispatcher.tp_ep_group).view(-1, len(sealed))
        tokens = gate.opened(rows, book=torch.is_grad_enabled()).sum(dim=1) // layer.config.moe_router_topk
        if len(set(tokens.tolist())) > 1:
            raise RankError(
                "packs of unlike length meet in Megatron's allgather dispatcher",
                f"{tokens.tolist()} tokens on the ranks of a group, layer {layer.layer_number - 1}",
                "set model.moe.dispatcher=alltoall",
            )
        return own(hidden_states, routing_map, probs)

    return preprocess
