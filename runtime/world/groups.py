"""One process group for each row of ranks into which the world is divided.

Groups made on demand hang: `dist.new_group` is a collective of the whole world, and its `use_local_synchronization`
deadlocks as soon as subsets overlap (0 waits in {0, 1} for 1, which waits in {1, 2} for 2, ...). So all ranks make all
groups up front, in one order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch.distributed as dist

from ...core.aliases import Ranks
from ...core.errors import EvenloadError
from .agreement import agree


def own_group(rows: Iterable[Ranks], *, on_host: bool = False) -> tuple[Ranks, dist.ProcessGroup]:
    """This rank's row and the process group of its ranks, which numbers them in ascending order. Collective.

    Args:
        rows: each a tuple of world ranks; repeats and the order of rows do not matter.
        on_host: tensors on the host are exchanged too, also where the world's backend is NCCL alone.

    Raises:
        RankError: the ranks gave different rows.
        EvenloadError: a row names a rank that is not in the world, or nobody, or this rank is not in one row alone.
    """
    wanted = sorted({tuple(row) for row in rows}, key=lambda row: (len(row), row))
    own = [row for row in wanted if dist.get_rank() in row]
    if len(own) != 1:
        count = f"rank {dist.get_rank()} is in {len(own)} of {len(wanted)} planes"
        raise EvenloadError("a rank does not know its plane", count, "list every rank of the world in one row")
    size = dist.get_world_size()
    for row in wanted:
        if not row or min(row) < 0 or max(row) >= size:
            raise EvenloadError(f"ranks {row} cannot form a group", f"a world of {size}", f"use 0 to {size - 1}")
    agree(hashlib.blake2b(repr(wanted).encode(), digest_size=16).digest(), "declarations of process groups", 0)
    only_nccl = "nccl" in dist.get_backend_config() and "gloo" not in dist.get_backend_config()
    backend = "cpu:gloo,cuda:nccl" if on_host and only_nccl else None
    groups = {row: dist.new_group(sorted(row), backend=backend) for row in wanted}
    return own[0], groups[own[0]]
