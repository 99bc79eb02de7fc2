"""Sends each sample from the rank that has read it to the ranks that compute some of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import Group, on_host


def exchange_bytes(
    own: Mapping[int, Tensor],
    source: Sequence[int],
    targets: Sequence[Collection[int]],
    sizes: Sequence[int],
    group: Group = None,
) -> dict[int, Tensor]:
    """The samples that this rank computes, by their number in the global batch, uint8, on the host.

    One all-to-all; every size follows from the arguments, which are the same on all ranks of ``group``, but for `own`.

    Args:
        own: what this rank has read, by number, uint8.
        source: rank in ``group`` that has read each sample.
        targets: ranks in ``group`` that compute some of each.
        sizes: of each [bytes].
    """
    if not dist.is_initialized():
        return dict(own)
    group = on_host(group)
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    leaving = [[i for i in own if other in targets[i]] for other in ranks]
    coming = [[i for i, there in enumerate(targets) if rank in there and source[i] == other] for other in ranks]
    nothing = torch.empty(0, dtype=torch.uint8)
    sent = torch.cat([nothing, *(own[i].cpu() for numbers in leaving for i in numbers)])
    to_come, to_leave = ([sum(sizes[i] for i in numbers) for numbers in one] for one in (coming, leaving))
    received = sent.new_empty(sum(to_come))
    dist.all_to_all_single(received, sent, to_come, to_leave, group=group)
    numbers = [i for of_rank in coming for i in of_rank]
    parts = torch.split(received, [sizes[i] for i in numbers]) if numbers else ()
    return dict(zip(numbers, parts, strict=True))
