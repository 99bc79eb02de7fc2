"""The ranks that adapters are summed, compared and gathered over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..world.agreement import Group


def sum_over(group: Group, tensors: Sequence[Tensor]) -> None:
    """Sum each tensor over the ranks of a group, in place, all in one message. Collective."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


class AdapterPeers(NamedTuple):
    """Where this rank stands; groups are process groups, None: this rank alone."""

    owners: Group = None
    """Ranks that hold equal parts of the model: each owns a run of every adapter."""
    model: Group = None
    """Ranks that hold the whole model together: pipeline stages and tensor-parallel ranks."""
    counts: bool = True
    """Whether this rank counts what tensor-parallel ranks hold alike."""

    @property
    def owner(self) -> int:
        return dist.get_rank(self.owners) if self.owners is not None else 0

    @property
    def num_owners(self) -> int:
        return dist.get_world_size(self.owners) if self.owners is not None else 1

    def sum_over_owners(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the owners, in place. Collective."""
        if self.num_owners > 1 and tensors:
            sum_over(self.owners, tensors)

    def sum_over_model(self, values: Tensor) -> Tensor:
        """Sum over the parts of the model, in place. Collective."""
        if self.model is not None:
            dist.all_reduce(values, group=self.model)
        return values

    def gather_runs(self, runs: Sequence[Tensor]) -> list[Tensor]:
        """Gather whole buffers, of each of which this owner has a run. Collective."""
        if self.owners is None or self.num_owners == 1 or not runs:
            return list(runs)
        own = torch.cat(list(runs))
        everyone = own.new_empty(self.num_owners, len(own))
        dist.all_gather_into_tensor(everyone.view(-1), own, group=self.owners)
        return [rows.reshape(-1) for rows in torch.split(everyone, [len(run) for run in runs], dim=1)]
