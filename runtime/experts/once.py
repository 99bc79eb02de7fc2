"""A token sent once to each node where any of its experts is, on its way to them and on the way of their outputs back.

An all-to-all of experts sends a row for each expert of a token. Here a row goes to each node with any of them, to the
rank there that has the sender's place in its node. That rank passes it on to the experts of its node as if it were its
own token, by the trainer's own dispatcher, which weighs their outputs and adds them up; the sum comes back as one row,
and the sums of nodes are added where the token is. Between nodes ranks of one place alone exchange anything.

Gradients take the same rows backwards: those of hidden states one row a node, those of probabilities with them.

Shape legend: R = ranks of a group, N = nodes, T = tokens of this rank, W = rows that came to it, S = slots of all
ranks, L = S/N of one node, H = hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class NodeRows(NamedTuple):
    """Which of this rank's tokens went to which node in a pass, and how many rows came from each."""

    group: Any
    tokens: Tensor
    """Of each row that left, node by node."""
    left: list[int]
    """Rows to each rank of the group."""
    came: list[int]
    num_tokens: int

    def summed(self, outputs_WH: Tensor) -> Tensor:
        """For each token of this rank, what all nodes have made of its rows [T, H], by what this one has."""
        rows: Tensor
        (rows,) = _Exchanged.apply(self.group, self.came, self.left, outputs_WH)  # type: ignore[no-untyped-call]
        return rows.new_zeros(self.num_tokens, rows.shape[1]).index_add(0, self.tokens, rows)


def sent_once(
    group: Any, size: int, hidden_TH: Tensor, chosen_TS: Tensor, probs_TS: Tensor
) -> tuple[NodeRows, Tensor, Tensor, Tensor]:
    """Rows that came to this rank for the experts of its node: hidden states [W, H], choices (bool) and probabilities
    of slots [W, S], of which those of other nodes are empty. ``size``: neighbouring ranks of a node. Collective."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    num_nodes, own = ranks // size, rank // size
    slots = chosen_TS.shape[1] // num_nodes
    chosen_TNL, probs_TNL = (each.view(-1, num_nodes, slots) for each in (chosen_TS, probs_TS))
    goes_NT = chosen_TNL.any(dim=2).T
    nodes, tokens = goes_NT.nonzero(as_tuple=True)
    peers = slice(rank % size, None, size)

    def by_rank(of_nodes: list[int]) -> list[int]:
        splits = [0] * ranks
        splits[peers] = of_nodes
        return splits

    leaving_N, ones = goes_NT.sum(dim=1), by_rank([1] * num_nodes)
    left, came = (by_rank(of.tolist()) for of in (leaving_N, _exchanged(group, ones, ones, leaving_N)))
    chosen_WL = _exchanged(group, left, came, chosen_TNL[tokens, nodes].to(torch.uint8)).bool()
    of_rows = hidden_TH.index_select(0, tokens), probs_TNL[tokens, nodes]
    hidden_WH, probs_WL = _Exchanged.apply(group, left, came, *of_rows)  # type: ignore[no-untyped-call]
    others = own * slots, (num_nodes - 1 - own) * slots
    chosen_WS, probs_WS = (torch.nn.functional.pad(each, others) for each in (chosen_WL, probs_WL))
    return NodeRows(group, tokens, left, came, len(hidden_TH)), hidden_WH, chosen_WS, probs_WS


def counts_in_node(counts_RS: Tensor, place: int, size: int) -> Tensor:
    """Tokens that each rank passes on to each slot of the node of the rank at a place [R, S], by what ranks have."""
    passed_RS = torch.zeros_like(counts_RS)
    first = place // size * size
    passed_RS[first : first + size] = counts_RS.view(-1, size, counts_RS.shape[1]).sum(dim=0)
    return passed_RS


def _exchanged(group: Any, left: list[int], came: list[int], rows: Tensor) -> Tensor:
    received = rows.new_empty(sum(came), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), came, left, group=group)
    return received


class _Exchanged(torch.autograd.Function):
    """Rows of several tensors, one after the other, to the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, group: Any, left: list[int], came: list[int], *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.journey = group, came, left
        return tuple(_exchanged(group, left, came, each) for each in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        group, came, left = ctx.journey
        return None, None, None, *(_exchanged(group, came, left, each) for each in gradients)
