"""Experts of Megatron's MoE layers cut over their group: each rank has a piece of every expert, as one parameter.

Megatron's DDP and optimizers see one matrix ``shards`` a layer, marked as the parameters of experts are: gradients are
summed over expert data-parallel ranks alone, and norms count every rank's. Padding is zero, gets no gradient and stays
zero. What is compared, shown or saved goes by the experts' own names, at their homes: `at_home` and `from_home` bring
it there and back. The module of Megatron's experts stays next to the pieces, without weights: passes call it with those
that they have fetched, and checkpoints fill it.

Shape legend: R = ranks of a group, E = experts, S = weights of a piece, N = weights of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....runtime.experts.owners import ShardedOwner
from .experts import layers_with_experts

SHARDS = ".shards"
"""How the name of the pieces ends."""


def shard_experts(gpt: Any) -> None:
    """Cut the experts of all layers of a GPTModel that have some, before it is wrapped. Collective."""
    for layer in layers_with_experts(gpt):
        layer.mlp.experts = ShardedExperts(layer.mlp.experts)


class ShardedExperts(nn.Module):
    """One piece of every expert of a layer.

    Args:
        home: Megatron's experts of this rank; their weights are given up. Making it is collective.
    """

    def __init__(self, home: Any) -> None:
        super().__init__()
        self._home = (home,)  # in a tuple: not a part of this module
        self.shapes = [p.shape for p in home.local_experts[0].parameters()]
        self._sizes = [shape.numel() for shape in self.shapes]
        self.group, self.num_ranks = home.ep_group, dist.get_world_size(home.ep_group)
        self.shards = nn.Parameter(self.from_home([p.detach() for p in home.parameters()]))
        vars(self.shards)["allreduce"] = False
        self.empty_home()

    @property
    def home(self) -> Any:
        """Megatron's experts, whose weights are there while `fill_home` has put them there."""
        return self._home[0]

    @property
    def local_experts(self) -> Any:
        return self.home.local_experts

    def owner(self) -> ShardedOwner:
        return ShardedOwner(self.shards, self.shapes, self.num_ranks)

    def at_home(self, pieces_ES: Tensor) -> list[Tensor]:
        """Whole tensors of this rank's own experts, one expert after the other, from what all ranks have in the place
        of `shards`. Collective."""
        pieces_ES = pieces_ES.to(self.shards.device).contiguous()
        whole = torch.empty_like(pieces_ES)
        dist.all_to_all_single(whole, pieces_ES, group=self.group)
        rows = whole.view(self.num_ranks, -1, pieces_ES.shape[1]).transpose(0, 1).flatten(1)
        return [
            part.view(shape)
            for row in rows
            for part, shape in zip(torch.split(row[: sum(self._sizes)], self._sizes), self.shapes, strict=True)
        ]

    def from_home(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's pieces [E, S] of what `at_home` gives on each rank. Collective."""
        rows = torch.cat([tensor.flatten() for tensor in tensors]).view(-1, sum(self._sizes))
        rows = nn.functional.pad(rows, (0, -sum(self._sizes) % self.num_ranks))
        leaving = rows.view(len(rows), self.num_ranks, -1).transpose(0, 1).contiguous()
        pieces = torch.empty_like(leaving)
        dist.all_to_all_single(pieces, leaving, group=self.group)
        return pieces.flatten(0, 1)

    @torch.no_grad()
    def fill_home(self) -> Any:
        """Megatron's experts with their weights. Collective."""
        for parameter, weight in zip(self.home.parameters(), self.at_home(self.shards), strict=True):
            parameter.data = weight.clone()
        return self.home

    def empty_home(self) -> None:
        """Give the weights up again, and what wrappers and optimizers have tied to them."""
        for parameter in self.home.parameters():
            parameter.data = parameter.data.new_empty(0)
            for name in ("main_grad", "main_param"):
                vars(parameter).pop(name, None)
