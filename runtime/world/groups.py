"""Process groups that are created once, by all ranks, in one order, and then looked up by their ranks.

Groups made on demand hang: `dist.new_group` is a collective of the whole world, and its `use_local_synchronization`
deadlocks as soon as subsets overlap (0 waits in {0, 1} for 1, which waits in {1, 2} for 2, ...). So everything that a
plan may ask for is declared up front.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch.distributed as dist

from ...core.aliases import Ranks
from ...core.errors import EvenloadError
from .agreement import agree


class GroupPool:
    """The declared process groups of this world; every rank builds the same pool, member or not.

    Args:
        ranks: the groups, each a tuple of world ranks; repeats and order do not matter.
        backend: as in `dist.new_group`; None takes the world's.

    Raises:
        RankError: the ranks declared different groups.
        EvenloadError: a group names a rank that is not in the world, or nobody.
    """

    def __init__(self, ranks: Iterable[Ranks], backend: str | None = None) -> None:
        wanted = sorted({tuple(sorted(set(group))) for group in ranks}, key=lambda group: (len(group), group))
        size = dist.get_world_size()
        for group in wanted:
            if not group or group[0] < 0 or group[-1] >= size:
                raise EvenloadError(f"ranks {group} cannot form a group", f"a world of {size}", f"use 0 to {size - 1}")
        agree(hashlib.blake2b(repr(wanted).encode(), digest_size=16).digest(), "declarations of process groups", 0)
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {
            group: dist.new_group(list(group), backend=backend) for group in wanted
        }

    def get(self, ranks: Ranks) -> dist.ProcessGroup:
        """The group of these ranks; its own numbering follows the sorted ranks, whatever order is asked for. Raises
        EvenloadError: it was not declared."""
        group = self._groups.get(tuple(sorted(ranks)))
        if group is None:
            known = ", ".join(map(str, self._groups)) or "none"
            raise EvenloadError(
                f"no process group of ranks {tuple(sorted(ranks))}",
                f"declared: {known if len(known) < 400 else f'{len(self._groups)} groups'}",
                "declare it when the GroupPool is made: a group made later would hang the ranks outside it",
            )
        return group

    def close(self) -> None:
        """Destroy the groups; call it on every rank, with no collective under way."""
        for ranks, group in self._groups.items():
            if dist.get_rank() in ranks:
                dist.destroy_process_group(group)
        self._groups = {}
