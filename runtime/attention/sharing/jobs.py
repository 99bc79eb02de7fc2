"""What a shared micro-batch asks of its ranks, as data: the slices of each CP group, how many tokens each brings, and
which heads a rank attends for.

Pure functions of the micro-batch and of the tokens of earlier slices, the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ....core.errors import EvenloadError
from ....core.plan.step_plan import MicroBatch, Slice
from ....core.plan.token_layout import CpGroup, cp_group_of

Before = Callable[[Slice, int], int]
"""Tokens of the slices before a slice that a plane rank holds."""


class GroupTokens(NamedTuple):
    """Keys and values of one slice that one group of its CP group brings."""

    before: int
    """Tokens of earlier slices."""
    first: int
    """Tokens of the slice's chunk j, where j is the number of the group."""
    second: int
    """Tokens of the slice's chunk 2g - 1 - j, where g is how many groups there are."""

    @property
    def own(self) -> int:
        return self.first + self.second

    @property
    def all(self) -> int:
        return self.before + self.own


class JobSlice(NamedTuple):
    """One slice of a job."""

    piece: Slice
    cut: bool
    """Whether earlier or later slices of its sequence are run as well."""
    group_tokens: tuple[GroupTokens, ...]
    """What each group of the CP group brings."""


class CpGroupJob(NamedTuple):
    """All slices of a micro-batch that have one CP group."""

    number: int
    """The job's place in its micro-batch; jobs are begun in this order on every rank."""
    cp_group: CpGroup
    parts: tuple[JobSlice, ...]

    def keys_of(self, group: int) -> int:
        """Tokens whose keys and values a group brings."""
        return sum(part.group_tokens[group].all for part in self.parts)


def jobs_of(
    micro_batch: MicroBatch, node_ranks: int, is_cut: Callable[[Slice], bool], before: Before
) -> tuple[CpGroupJob, ...]:
    """The jobs of a micro-batch: those that send between nodes first, then those inside a node, then those that do not.

    So what takes longest is on its way first, and the others compute meanwhile (Zeppelin, arXiv 2509.21841).
    """
    slices_of: dict[CpGroup, list[Slice]] = {}
    for number, piece in enumerate(micro_batch.slices):
        slices_of.setdefault(cp_group_of(micro_batch, number), []).append(piece)
    cp_groups = sorted(slices_of, key=lambda cp_group: _nearness(cp_group, node_ranks))  # stable
    return tuple(
        CpGroupJob(
            number, cp_group, tuple(_part(piece, cp_group, is_cut(piece), before) for piece in slices_of[cp_group])
        )
        for number, cp_group in enumerate(cp_groups)
    )


def _nearness(cp_group: CpGroup, node_ranks: int) -> int:
    """0 for a CP group that sends keys between nodes, 1 for one inside a node, 2 for one that sends none."""
    if cp_group.groups == 1:
        return 2
    return int(len({rank // node_ranks for rank in cp_group.ranks} if node_ranks else {0}) == 1)


def _part(piece: Slice, cp_group: CpGroup, cut: bool, before: Before) -> JobSlice:
    length, chunks = piece.length, 2 * cp_group.groups
    bounds = [c * length // chunks for c in range(chunks + 1)]
    sizes = [end - first for first, end in pairwise(bounds)]
    group_tokens = []
    for group in range(cp_group.groups):
        earlier = before(piece, cp_group.ranks[group * cp_group.ulysses_degree]) if cut else 0
        group_tokens.append(GroupTokens(earlier, sizes[group], sizes[chunks - 1 - group]))
    return JobSlice(piece, cut, tuple(group_tokens))


class Heads(NamedTuple):
    """A run of query heads and the key/value heads that they read."""

    queries: slice
    keys: slice
    copies: tuple[int, ...] = ()
    """The key head, counted from `keys.start`, of every run of equally many query heads; empty: each key head once."""

    def spread(self, x_MGD: Tensor) -> Tensor:
        """Key heads as the blocks want them: each for equally many query heads in a row."""
        return x_MGD.index_select(1, _index(self.copies, x_MGD.device)) if self.copies else x_MGD

    def folded(self, grad_MKD: Tensor) -> Tensor:
        """Gradients of the key heads from those of `spread`."""
        if not self.copies:
            return grad_MKD
        keys, dim = self.keys.stop - self.keys.start, grad_MKD.shape[-1]
        index = _index(self.copies, grad_MKD.device)
        return grad_MKD.new_zeros(len(grad_MKD), keys, dim).index_add_(1, index, grad_MKD)


@cache
def _index(copies: tuple[int, ...], device: torch.device) -> Tensor:
    """On the device once: to copy it there in every call would stop the host."""
    return torch.tensor(copies, device=device)


def heads_of(share: int, shares: int, num_queries: int, num_keys: int) -> Heads:
    """The heads of one of the ranks that share them; nearly equal runs of query heads. A key head that query heads of
    two ranks read is with both. Raises EvenloadError: there are fewer query heads than ranks."""
    if num_queries < shares:
        counts = f"{num_queries} heads, {shares} ranks"
        raise EvenloadError(
            "more ranks share heads than there are", counts, "use a ring, or a hybrid with smaller groups"
        )
    first, end = (i * num_queries // shares for i in (share, share + 1))
    each = num_queries // num_keys
    keys = slice(first // each, (end - 1) // each + 1)
    readers = [min(end, (g + 1) * each) - max(first, g * each) for g in range(keys.start, keys.stop)]
    run = math.gcd(*readers)
    copies = tuple(g for g, count in enumerate(readers) for _ in range(count // run))
    return Heads(slice(first, end), keys, copies if len(copies) > len(readers) else ())
