"""Objects that move between ranks: one list of them for each rank, as bytes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .....runtime.world.agreement import wire_device

Thing = TypeVar("Thing")


def exchange_objects(
    own: Mapping[int, Thing], source: Sequence[int], target: Sequence[int], group: Any
) -> dict[int, Thing]:
    """What this rank is to have, by place. Collective; what stays is not copied.

    Args:
        own: what this rank has, by place: picklable, with tensors on the CPU.
        source, target: rank in ``group`` that has, and that is to have, what belongs to each place; the same on all.
    """
    me, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    there = wire_device(group)
    parcels = [pickle.dumps({i: own[i] for i in own if target[i] == rank != me}) for rank in ranks]
    sizes = torch.tensor([len(parcel) for parcel in parcels], device=there)
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    sent = torch.frombuffer(bytearray(b"".join(parcels)), dtype=torch.uint8).to(there)
    received = sent.new_empty(int(coming.sum()))
    dist.all_to_all_single(received, sent, coming.tolist(), sizes.tolist(), group=group)
    things = {i: own[i] for i in own if target[i] == me}
    for part in torch.split(received.cpu(), coming.tolist()):
        things |= pickle.loads(part.numpy().tobytes())
    assert things.keys() == {i for i, rank in enumerate(target) if rank == me}, (sorted(things), source)
    return things
