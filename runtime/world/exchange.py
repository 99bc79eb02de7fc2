"""Sends each sample from the rank that has read it to the ranks that compute some of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import Group, wire_device


def exchange(
    own: Mapping[int, Tensor],
    source: Sequence[int],
    targets: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    rows: int,
    group: Group = None,
) -> dict[int, Tensor]:
    """The samples that this rank computes, by their place in the global batch, on the CPU.

    One all-to-all; every size follows from the arguments, which are the same on all ranks of ``group``, but for `own`.

    Args:
        own: what this rank has read, by place: int64 [rows, L], so many values of each of L tokens.
        source: rank in ``group`` that has read the sample at each place.
        targets: ranks in ``group`` that compute some of the sample at each place.
        lengths: of the sample at each place [tokens].
    """
    if not dist.is_initialized():
        return dict(own)
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    leaving = [[place for place in own if other in targets[place]] for other in ranks]
    coming = [[p for p, there in enumerate(targets) if rank in there and source[p] == other] for other in ranks]
    device = wire_device(group)
    parts = [own[place].flatten() for places in leaving for place in places]
    sent = torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.int64, device=device)
    to_come, to_leave = (
        [rows * sum(lengths[place] for place in places) for places in one] for one in (coming, leaving)
    )
    received = sent.new_empty(sum(to_come))
    dist.all_to_all_single(received, sent, to_come, to_leave, group=group)
    places = [place for row in coming for place in row]
    pieces = torch.split(received.cpu(), [rows * lengths[place] for place in places]) if places else ()
    return {place: piece.view(rows, -1) for place, piece in zip(places, pieces, strict=True)}
