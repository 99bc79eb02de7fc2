"""Keys and values of sequences that grow token by token, in blocks, without gradients.

What `PrefixStore` is to the slices of a step, this is to the tokens of a generation: they stay from one forward to the
next, until their sequence ends. `CachedRows` is what one forward reads and writes of it, and travels with its pack.

Shape legend: T = tokens of a forward, S = tokens of a block, N = blocks, G = key/value heads, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from ...core.aliases import Ints
from ...core.plan.step_plan import Slice
from .block_tables import BlockTables
from .copy_rows import copy_rows
from .decode_rows import NO_ROW, DecodeRows, size_class

Pools = tuple[Tensor, Tensor]
"""Keys and values of a layer, [N, S, G, D] each; on the CPU the tokens of a head lie side by side."""


class KvCache:
    """The keys and values of one rank, by layer, in the blocks of ``tables``."""

    def __init__(self, tables: BlockTables) -> None:
        self.tables = tables
        self._pools: dict[int, Pools] = {}

    def write(self, layer: int, rows: CachedRows, k_TGD: Tensor, v_TGD: Tensor) -> Pools:
        """Keep the keys and values of some rows where they belong; all of the layer."""
        pools = self._pools.get(layer)
        if pools is None or len(pools[0]) < self.tables.num_blocks:
            pools = self._pools[layer] = self._grown(pools, k_TGD, v_TGD)
        for pool, values in zip(pools, (k_TGD, v_TGD), strict=True):
            pool[rows.places_2T[0], rows.places_2T[1]] = values[: rows.places_2T.shape[1]].to(pool.dtype)
        return pools

    def copy_block(self, source: int, target: int) -> None:
        """Write what a block holds into another one, in all layers."""
        for layer, pools in self._pools.items():
            if target >= len(pools[0]):
                pools = self._pools[layer] = self._grown(pools, pools[0][0], pools[1][0])
            for pool in pools:
                pool[target] = pool[source]

    def _grown(self, pools: Pools | None, k_TGD: Tensor, v_TGD: Tensor) -> Pools:
        """Twice as many blocks as are wanted, so that growing costs a copy of each a few times; zeros where nothing was
        written, for a weight of 0 times what memory may hold need not be 0."""
        wanted, size = self.tables.at_most(2 * self.tables.num_blocks), self.tables.block_tokens
        shape, on_host = (wanted, size, *k_TGD.shape[1:]), k_TGD.device.type == "cpu"
        by_head = wanted, shape[2], size, shape[3]
        new = [
            values.new_zeros(by_head).transpose(1, 2) if on_host else values.new_zeros(shape)
            for values in (k_TGD, v_TGD)
        ]
        for pool, old in zip(new, pools or (), strict=False):
            pool[: len(old)] = old
        return new[0], new[1]


@dataclass(frozen=True, eq=False)
class CachedRows:
    """What the slices of a forward have in a cache: those that attend one by one first, then rows of a few tokens, the
    longer ones first."""

    cache: KvCache
    slices: tuple[Slice, ...]
    device: torch.device
    drafted: Mapping[int, int] = field(default_factory=dict)
    """Tokens at the end of a slice that are guesses, by its sequence."""

    @classmethod
    def of(
        cls, cache: KvCache, slices: Sequence[Slice], device: torch.device, drafted: Mapping[int, int] | None = None
    ) -> CachedRows:
        return cls(cache, tuple(sorted(slices, key=size_class, reverse=True)), device, drafted or {})

    @cached_property
    def long(self) -> tuple[Slice, ...]:
        """The slices that attend one by one."""
        return tuple(piece for piece in self.slices if size_class(piece) == NO_ROW)

    @cached_property
    def short(self) -> tuple[DecodeRows, ...]:
        """All others, by the call in which they attend."""
        classes = groupby(self.slices[len(self.long) :], key=size_class)
        return tuple(DecodeRows(self.cache.tables, tuple(own), self.device) for _, own in classes)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Where slices that attend one by one begin among all tokens, and where the first row begins."""
        return tuple(accumulate((piece.length for piece in self.long), initial=0))

    @cached_property
    def places_2T(self) -> Tensor:
        """int64; the block, and the place in it, of each token's keys."""
        none = np.zeros((2, 0), dtype=np.int64)
        places = np.concatenate([none, *map(self._places, self.long), *(rows.places_2T for rows in self.short)], 1)
        return copy_rows({"places": places}, self.device)["places"]

    @cached_property
    def positions_T(self) -> Ints:
        """The place of each token in its sequence."""
        of_long = (np.arange(piece.start, piece.stop) for piece in self.long)
        return np.concatenate([np.zeros(0, dtype=np.int64), *of_long, *(rows.positions_T for rows in self.short)])

    def blocks_of(self, piece: Slice) -> Tensor:
        """int64; the blocks of the tokens up to the end of a slice."""
        tables = self.cache.tables
        blocks = np.array(tables[piece.sequence][: tables.size(piece.stop)], dtype=np.int64)
        return copy_rows({"blocks": blocks}, self.device)["blocks"]

    def _places(self, piece: Slice) -> Ints:
        tokens, size = np.arange(piece.start, piece.stop), self.cache.tables.block_tokens
        blocks = np.array(self.cache.tables[piece.sequence], dtype=np.int64)
        return np.stack([blocks[tokens // size], tokens % size])
