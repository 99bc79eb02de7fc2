"""Count headers, marks and copies at Megatron-Core's MoE layers (`runtime.experts`).

Megatron's alltoall dispatcher gathers the counts of a layer in its `preprocess`; here they are gathered right before,
with headers, and what it would gather is known then. Before it exchanges tokens it waits for their sizes on the host;
the headers have come by then, too, and are checked. Where the plan's planner of layers gives a rank copies of experts,
the dispatcher sees slots instead of experts: a rank's own ones and its copies (`runtime.experts.balance`). Router,
parameters and checkpoints know experts alone.

The allgather dispatcher and flexible ones know no counts; they are gathered before tokens move. They want equally many
tokens from all ranks of a group: shorter packs are filled up with tokens that go to no expert. They have no copies.

Shape legend: R = ranks of a group, T = slots of a pack, E = experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.func import functional_call

from ....runtime.attention.copy_rows import copy_rows
from ....runtime.attributes import with_attributes
from ....runtime.experts.copies import Fetch
from ....runtime.experts.gate import ExpertGate
from ....runtime.experts.once import NodeRows, counts_in_node, sent_once
from ....runtime.experts.owners import HomeOwner, Owner
from .experts import PlannedRouter, layers_with_experts
from .sharded_experts import ShardedExperts


def bind_gate(gpt: Any, gate: ExpertGate) -> ExitStack:
    """Let all layers of a GPTModel that have experts pass the gate, until the stack that is returned is closed."""
    undo = ExitStack()
    for layer in layers_with_experts(gpt):
        undo.callback(gate.mark_around(layer.mlp, layer.layer_number - 1))
        bound, dispatcher, experts = _GatedLayer(layer, gate), layer.mlp.token_dispatcher, layer.mlp.experts
        dispatcher.dispatch_preprocess, experts.forward = bound.preprocess, bound.forward
        dispatcher.combine_postprocess = bound.postprocess
        if bound.exchanges:
            dispatcher._maybe_dtoh_and_synchronize = bound.synchronize
            undo.callback(delattr, dispatcher, "_maybe_dtoh_and_synchronize")
        undo.callback(delattr, dispatcher, "dispatch_preprocess")
        undo.callback(delattr, dispatcher, "combine_postprocess")
        undo.callback(delattr, experts, "forward")
        undo.callback(bound.lay_out, layer.mlp.num_local_experts)
    return undo


def _permuted(permute: Callable[..., Any], tokens: Tensor, routing_map: Tensor, **how: Any) -> Any:
    """Megatron's `permute` of rows for a node: each goes to a number of experts of its own, and 0.19 counts on one that
    is the same for all."""
    return permute(tokens, routing_map, **{**how, "num_out_tokens": int(routing_map.sum())})


class _GatedLayer:
    """A layer between its router and its experts, in one pass after the other."""

    def __init__(self, layer: Any, gate: ExpertGate) -> None:
        self._layer, self._gate = layer, gate
        self._dispatcher, self._experts = layer.mlp.token_dispatcher, layer.mlp.experts
        self._own_preprocess = self._dispatcher.dispatch_preprocess
        self._own_postprocess: Callable[[Tensor], Tensor] = self._dispatcher.combine_postprocess
        self._own_forward: Callable[..., tuple[Tensor, None]] = self._experts.forward
        self.exchanges = isinstance(self._dispatcher, MoEAlltoAllTokenDispatcher)
        self._own_synchronize: Any = self._dispatcher._maybe_dtoh_and_synchronize if self.exchanges else None
        self._number: int = layer.layer_number - 1
        self._own: int = layer.mlp.num_local_experts
        self._sharded = isinstance(self._experts, ShardedExperts)
        self._fetch: Fetch | None = None
        """Of the pass that is running; None without copies."""
        self._rows: NodeRows | None = None
        """Of the pass that is running, where tokens go once to a node."""
        self._tokens = 0
        """Of its pack on this rank, if it is filled up."""

    def preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """What stands in for `dispatch_preprocess`: the gate first, then the dispatcher's own."""
        record = torch.is_grad_enabled()
        sent_RE = self._gathered(routing_map, record)
        if not self.exchanges:
            return self._own_preprocess(*self._filled_up(hidden_states, routing_map, probs))
        shares = self._gate.shares(self._number, record=record)
        counts = sent_RE.flatten()
        self._fetch = self._rows = None
        if shares is not None:
            # The weights travel while tokens do.
            homes = (list(expert.parameters()) for expert in self._experts.local_experts)
            owner: Owner = self._experts.owner() if self._sharded else HomeOwner(list(homes))
            self._fetch = shares.fetch(self._dispatcher.ep_group, owner)
        if shares is not None and any(shares.copies):
            rows = {"counts": shares.counts_of_slots.ravel()}
            counts = copy_rows(rows, counts.device)["counts"].to(counts.dtype)
            routing_map, probs = shares.spread(routing_map, probs)
        self.lay_out(self._own if shares is None else shares.slots)
        stand_ins: dict[str, Any] = {}
        if self._gate.once_ranks:
            stand_ins["permute"] = partial(_permuted, token_dispatcher.permute)
            self._gate.check()
            hidden_states, routing_map, probs, counts = self._once(hidden_states, routing_map, probs, counts)
        stand_ins["gather_from_sequence_parallel_region"] = lambda *_, **__: counts
        with with_attributes(token_dispatcher, **stand_ins):
            return self._own_preprocess(hidden_states, routing_map, probs)

    def synchronize(self, point: str, *counts: Any) -> Any:
        """What stands in for the dispatcher's own wait for sizes on the host, at one of its points."""
        counts = self._own_synchronize(point, *counts)
        if point == "before_ep_alltoall":
            self._gate.check()
        return counts

    def postprocess(self, hidden_states: Tensor) -> Tensor:
        """`combine_postprocess`, without what fills up a pack; what nodes have made of a token is added up."""
        output = self._own_postprocess(hidden_states)
        if self._rows is not None:
            rows, self._rows = self._rows, None
            return rows.summed(output).view(self._shape)
        return output[: self._tokens] if self._tokens else output

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """The forward of Megatron's experts, then of this rank's copies."""
        fetch, self._fetch = self._fetch, None
        if fetch is None:
            return self._own_forward(tokens, tokens_per_expert, probs)
        tokens, probs, copies = fetch.arrived(tokens, probs)
        # One split and one sum of gradients, as in Megatron's own forward: a part of the tokens more is a copy of all.
        sizes = tokens_per_expert.tolist()
        parts = list(zip(torch.split(tokens, sizes), torch.split(probs, sizes), strict=True))
        experts = self._experts.local_experts
        at_home = 0 if self._sharded else self._own
        outputs = [expert(*part)[0] for expert, part in zip(experts, parts[:at_home], strict=False)]
        names = [name for name, _ in experts[0].named_parameters()]
        with fetch.saving():
            for weights, part in zip(copies, parts[at_home:], strict=False):
                outputs.append(functional_call(experts[0], dict(zip(names, weights, strict=True)), part)[0])
        return fetch.again_behind(torch.cat(outputs)), None

    def _once(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        """What `dispatch_preprocess` takes, and the counts it gathers, for rows that came to this rank for its node."""
        group, size, self._shape = self._dispatcher.ep_group, self._gate.once_ranks, hidden_states.shape
        self._rows, *rows = sent_once(group, size, hidden_states.view(-1, self._shape[-1]), routing_map, probs)
        counts_RS = counts.view(-1, routing_map.shape[1])
        return *rows, counts_in_node(counts_RS, torch.distributed.get_rank(group), size).flatten()

    def _gathered(self, routing_map: Tensor, record: bool) -> Tensor:
        """Tokens of each rank of the group for each expert [R, E]."""
        router = self._layer.mlp.router
        tokens = router.own_tokens()[:, None] if isinstance(router, PlannedRouter) else True
        counted_E = (routing_map & tokens).sum(dim=0)
        counts = self._gate.with_header(self._number, routing_map.sum(dim=0), counted_E)
        rows, dispatcher = counts, self._dispatcher
        if dispatcher.ep_size > 1 or dispatcher.tp_size > 1:
            rows = token_dispatcher.gather_from_sequence_parallel_region(counts, group=dispatcher.tp_ep_group)
        return self._gate.take(self._number, rows.view(-1, len(counts)), record=record)

    def lay_out(self, slots: int) -> None:
        """Let the dispatcher see so many slots on each rank instead of its experts."""
        dispatcher = self._dispatcher
        if dispatcher.num_local_experts == slots:
            return
        first, ranks = slots * torch.distributed.get_rank(dispatcher.ep_group), dispatcher.ep_size
        chunks = torch.arange(ranks * slots, device=dispatcher.sort_input_by_local_experts.device)
        dispatcher.num_local_experts, dispatcher.num_experts = slots, ranks * slots
        dispatcher.local_expert_indices = list(range(first, first + slots))
        dispatcher.sort_input_by_local_experts = chunks.view(-1, slots).T.ravel()
        dispatcher.restore_output_by_local_experts = chunks.view(slots, -1).T.ravel()

    def _filled_up(self, *rows: Tensor) -> Iterator[Tensor]:
        """With as many rows as the longest pack of the group has tokens; those after it go to no expert."""
        config, self._tokens, sent_RE = self._layer.config, 0, self._gate.check()
        # Where tokens are dropped, counts do not tell lengths; but there micro-batches are the trainer's own.
        if config.moe_expert_capacity_factor is None and sent_RE is not None:
            own, longest = len(rows[0]), int(sent_RE.sum(dim=1).max()) // config.moe_router_topk
            self._tokens = own if longest > own else 0
        for row in rows:
            yield torch.cat([row, row.new_zeros(longest - own, *row.shape[1:])]) if self._tokens else row
