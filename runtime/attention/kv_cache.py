"""Keys and values of sequences that grow token by token, in blocks, without gradients.

What `PrefixStore` is to the slices of a step, this is to the tokens of a generation: they stay from one forward to the
next, until their sequence ends. `CachedRows` is what one forward reads and writes of it, and travels with its pack.

Shape legend: T = tokens of a forward, B = its rows of one token each, W = blocks of the longest of these, S = tokens of
a block, L = W * S, N = blocks, G = key/value heads, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ...core.aliases import Ints
from ...core.plan.step_plan import Slice
from .block_tables import BlockTables
from .copy_rows import copy_rows

Pools = tuple[Tensor, Tensor]
"""Keys and values of a layer, [N, S, G, D] each."""


class KvCache:
    """The keys and values of one rank, by layer, in the blocks of ``tables``."""

    def __init__(self, tables: BlockTables) -> None:
        self.tables = tables
        self._pools: dict[int, Pools] = {}

    def write(self, layer: int, places_T: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Pools:
        """Keep keys and values at these places, each block * S + place in the block; all of the layer."""
        pools = self._pools.get(layer)
        if pools is None or len(pools[0]) < self.tables.num_blocks:
            pools = self._pools[layer] = self._grown(pools, k_TGD, v_TGD)
        for pool, values in zip(pools, (k_TGD, v_TGD), strict=True):
            pool.flatten(0, 1).index_copy_(0, places_T, values[: len(places_T)].to(pool.dtype))
        return pools

    def copy_block(self, source: int, target: int) -> None:
        """Write what a block holds into another one, in all layers."""
        for layer, pools in self._pools.items():
            if target >= len(pools[0]):
                pools = self._pools[layer] = self._grown(pools, *(pool.flatten(0, 1) for pool in pools))
            for pool in pools:
                pool[target] = pool[source]

    def _grown(self, pools: Pools | None, k_TGD: Tensor, v_TGD: Tensor) -> Pools:
        """Twice as many blocks as are wanted, so that growing costs a copy of each a few times; zeros where nothing was
        written, for a weight of 0 times what memory may hold need not be 0."""
        wanted, size = self.tables.at_most(2 * self.tables.num_blocks), self.tables.block_tokens
        new = [values.new_zeros(wanted, size, *values.shape[1:]) for values in (k_TGD, v_TGD)]
        for pool, old in zip(new, pools or (), strict=False):
            pool[: len(old)] = old
        return new[0], new[1]


@dataclass(frozen=True, eq=False)
class CachedRows:
    """What the slices of a forward have in a cache: those of several tokens first, then rows of one token each."""

    cache: KvCache
    slices: tuple[Slice, ...]
    device: torch.device
    _seen: dict[int | None, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: KvCache, slices: Sequence[Slice], device: torch.device) -> CachedRows:
        return cls(cache, tuple(sorted(slices, key=lambda piece: piece.length == 1)), device)

    @cached_property
    def long(self) -> tuple[Slice, ...]:
        """The slices of several tokens."""
        return tuple(piece for piece in self.slices if piece.length > 1)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Where slices of several tokens begin among all tokens, and where the rows of one token each begin."""
        return tuple(accumulate((piece.length for piece in self.long), initial=0))

    @cached_property
    def tables_BW(self) -> Tensor:
        """int64; blocks of the rows of one token, any block behind the last one of a row."""
        return self._on_device["tables"]

    @cached_property
    def lengths_B(self) -> Tensor:
        """int32; keys that each of these rows sees, its own included."""
        return self._on_device["lengths"]

    @cached_property
    def places_T(self) -> Tensor:
        """int64; where the keys of each token go."""
        return self._on_device["places"]

    def blocks_of(self, piece: Slice) -> Tensor:
        """int64; the blocks of the tokens up to the end of a slice."""
        tables = self.cache.tables
        blocks = np.array(tables[piece.sequence][: tables.size(piece.stop)], dtype=np.int64)
        return copy_rows({"blocks": blocks}, self.device)["blocks"]

    def seen_B11L(self, window: int | None) -> Tensor:
        """Which keys of its blocks a row sees; in a window so many before its own. bool [B, 1, 1, L]."""
        if window not in self._seen:
            length = self.tables_BW.shape[1] * self.cache.tables.block_tokens
            places_L, last_B1 = torch.arange(length, device=self.device), self.lengths_B[:, None] - 1
            seen_BL = places_L <= last_B1
            if window is not None:
                seen_BL &= places_L >= last_B1 - window
            self._seen[window] = seen_BL[:, None, None]
        return self._seen[window]

    @cached_property
    def _on_device(self) -> dict[str, Tensor]:
        tables, rows = self.cache.tables, self.slices[len(self.long) :]
        widest = max((tables.size(piece.stop) for piece in rows), default=0)
        blocks_BW = np.zeros((len(rows), widest), dtype=np.int64)
        for row, piece in enumerate(rows):
            own = tables[piece.sequence][: tables.size(piece.stop)]
            blocks_BW[row, : len(own)] = own
        stops = np.array([piece.stop for piece in rows], dtype=np.int64)
        last = stops - 1
        own_B = np.take_along_axis(blocks_BW, last[:, None] // tables.block_tokens, 1)[:, 0] if len(rows) else last
        of_rows = own_B * tables.block_tokens + last % tables.block_tokens
        places = np.concatenate([*map(self._places, self.long), of_rows])
        arrays: dict[str, Ints] = {"tables": blocks_BW, "lengths": stops.astype(np.int32), "places": places}
        return copy_rows(arrays, self.device)

    def _places(self, piece: Slice) -> Ints:
        tokens, size = np.arange(piece.start, piece.stop), self.cache.tables.block_tokens
        blocks = np.array(self.cache.tables[piece.sequence], dtype=np.int64)
        places: Ints = blocks[tokens // size] * size + tokens % size
        return places
