"""Messages between the ranks that may share a micro-batch: one process group for all subsets of them.

Groups made on demand hang: `dist.new_group` is a collective of the whole world, and its `use_local_synchronization`
deadlocks as soon as subsets overlap (0 waits in {0, 1} for 1, which waits in {1, 2} for 2, ...). So all ranks make all
groups up front, in one order (`own_group`).

A ring of any ranks, in any order, is point-to-point traffic on the group of the whole plane, so that no plan needs a
group of its own. Nothing here waits before everything was posted; who posts in one order of events on every rank, and
waits for earlier events alone, cannot deadlock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.aliases import Ranks
from ...core.errors import EvenloadError, RankError
from .agreement import Group, agree, time_limit, wire_device

Transfer = tuple[int, Tensor]
"""A plane rank and the contiguous tensor that goes to it or is to be filled by it."""

_MEET_TAG = 1
FIRST_TAG = 16
"""Tags below are the plane's own."""


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
    groups = {row: dist.new_group(sorted(row), time_limit(), backend) for row in wanted}
    return own[0], groups[own[0]]


class Pending:
    """Transfers under way; their buffers live until `wait`."""

    def __init__(self, works: Sequence[dist.Work], sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        self._works = works
        self._sends = sends
        self._receives = receives

    def wait(self) -> dict[int, Tensor]:
        """What came, by sender; on CUDA it is the stream that waits, not the host."""
        for work in self._works:
            work.wait()
        received = dict(self._receives)
        self._works = ()
        self._sends = ()
        self._receives = ()
        return received


class Plane:
    """The ranks of one tensor-parallel rank and pipeline stage, numbered as plans number them.

    Args:
        group: a process group of all of them; None: they exchange nothing.
        ranks: the world rank of each plane rank.
        rank: the plane rank of this process.
        node_ranks: neighbouring plane ranks that share a node; 0: all do.
    """

    def __init__(self, group: Group, ranks: Ranks, rank: int, node_ranks: int = 0) -> None:
        self.group = group
        self.ranks = ranks
        self.rank = rank
        self.node_ranks = node_ranks

    @classmethod
    def make(cls, rows: Iterable[Ranks], node_ranks: int = 0) -> Plane:
        """The plane of this process. A collective of the whole world.

        Args:
            rows: the world ranks of every plane, one for each tensor-parallel rank and stage, in plane order. Raises as
                `own_group`.
        """
        own, group = own_group(rows, on_host=True)  # where `meet` compares
        # NCCL lets the first call of a group be point-to-point only if all its ranks take part.
        for device in dict.fromkeys((wire_device(group), _tensor_device(group))):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        return cls(group, own, own.index(dist.get_rank()), node_ranks)

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer], tag: int) -> Pending:
        """Start messages to and from plane ranks; empty ones are left out on both sides.

        ``tag``: the same on both ends, `FIRST_TAG` or more. Where the backend knows tags, ranks that disagree about
        what comes next then wait, and the watchdog tells so, instead of taking each other's numbers.
        """
        sends, receives = ([(peer, t) for peer, t in row if t.numel()] for row in (sends, receives))
        ops = [dist.P2POp(dist.isend, t, self.ranks[peer], self.group, tag) for peer, t in sends]
        ops += [dist.P2POp(dist.irecv, t, self.ranks[peer], self.group, tag) for peer, t in receives]
        return Pending(dist.batch_isend_irecv(ops) if ops else (), sends, receives)

    def meet(self, number: int, digest: bytes, peers: Ranks, kind: Literal["F", "B"] = "F") -> None:
        """Return if the neighbours of this rank in a shared micro-batch are about to run the same pass.

        A check between neighbours on the host, called by all plane ranks of the micro-batch (``peers``) at the start of
        the pass, with its number in the plan and the plan's digest. Raises RankError if one runs another pass or plan.
        """
        at = peers.index(self.rank)
        neighbours = sorted({peers[at - 1], peers[(at + 1) % len(peers)]} - {self.rank})
        device = wire_device(self.group)
        message = torch.tensor([number, kind == "B", *digest[:16].ljust(16, b"\0")], dtype=torch.int64).to(device)
        receives = [(peer, torch.empty_like(message)) for peer in neighbours]
        messages = self.post([(peer, message) for peer in neighbours], receives, _MEET_TAG).wait()
        for peer, theirs in messages.items():
            if not torch.equal(theirs, message):
                here, there = (
                    f"rank {self.ranks[r]}: {_pass_name(t)}" for r, t in ((self.rank, message), (peer, theirs))
                )
                raise RankError(
                    "ranks that share a micro-batch run different passes",
                    f"{here}; {there}",
                    "give every rank the same recipe and data, and run its passes in the order of the plan",
                )

    def close(self) -> None:
        """Destroy the group; call it on every rank, with nothing under way."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


def _pass_name(message: Tensor) -> str:
    number, backward, *digest = message.tolist()
    return f"{'B' if backward else 'F'}{number} of plan {bytes(digest).hex()[:12]}"


def _tensor_device(group: Group) -> torch.device:
    with_cuda = torch.cuda.is_available() and "cuda" in dist.get_backend_config(group)
    return torch.device("cuda", torch.cuda.current_device()) if with_cuda else wire_device(group)
