"""How ranks share a pack's micro-batch: who holds which of its tokens, and who attends for them.

The layout alone, below the pack that carries it; `attention` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch

from ....core.plan.step_plan import MicroBatch, Slice
from ....core.plan.token_layout import Pieces, cp_group_of, dealt, layout_of
from ...world.plane import Plane
from ..prefix import PrefixStore
from .jobs import CpGroupJob, jobs_of
from .relayout import Relayout, relayout_of

PiecesOf = Callable[[int], Pieces]
"""Gives what a plane rank has of a micro-batch."""


def token_layout(micro_batch: MicroBatch, plane: Plane) -> PiecesOf:
    """The token layout of a shared micro-batch: worked out rank by rank, or for all at once where it is remapped."""
    if micro_batch.remap:
        return layout_of(micro_batch, plane.node_ranks).__getitem__
    return partial(_dealt_to, micro_batch)


def _dealt_to(micro_batch: MicroBatch, rank: int) -> Pieces:
    pieces: list[Slice] = []
    for number, piece in enumerate(micro_batch.slices):
        cp_group = cp_group_of(micro_batch, number)
        pieces += dealt(piece, cp_group, cp_group.ranks.index(rank)) if rank in cp_group.ranks else ()
    return tuple(pieces)


@dataclass(frozen=True, eq=False)
class Shared:
    """How ranks share the micro-batch of a pack."""

    plane: Plane
    micro_batch: MicroBatch
    pieces_of: PiecesOf
    store: PrefixStore | None
    """Keys and values of the sequences that are cut."""
    starts: tuple[int, ...]
    """The first slot of each piece of this rank in the pack."""
    num_padded_tokens: int
    """Slots of the pack."""

    @classmethod
    def alone(cls, pieces: Pieces, store: PrefixStore | None, borders: tuple[int, ...]) -> Shared:
        """Pieces between these slots that the store's rank has for itself; whole sequences need no store."""
        rank = store.rank if store else 0
        plane, micro_batch = Plane(None, (rank,), rank), MicroBatch(pieces, (rank,))
        return cls(plane, micro_batch, lambda _: pieces, store, borders[:-1], borders[-1])

    @cached_property
    def jobs(self) -> tuple[CpGroupJob, ...]:
        """All jobs of the micro-batch, those of other ranks too."""
        store = self.store
        return jobs_of(
            self.micro_batch,
            self.plane.node_ranks,
            lambda piece: store is not None and piece.sequence in store,
            lambda piece, rank: store.before(piece, rank) if store else 0,
        )

    @cached_property
    def relayout(self) -> Callable[[tuple[int, int], torch.device], Relayout]:
        """Gives the way from the token layout to that of attention, for (query heads, key heads) on a device."""
        holders = self.micro_batch.ranks if self.micro_batch.remap else ()
        settled = self.plane, self.pieces_of, holders, self.starts, self.num_padded_tokens, self.jobs
        return cache(partial(relayout_of, *settled))
