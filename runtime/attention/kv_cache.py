"""Keys and values of sequences that grow token by token, in blocks, without gradients.

What `PrefixStore` is to the slices of a step, this is to the tokens of a generation: they stay from one forward to the
next, until their sequence ends. `CachedRows` is what one forward reads and writes of it, and travels with its pack.

Shape legend: T = tokens of a forward, B = its rows of one token each, W = blocks of the longest of these, S = tokens of
a block, L = W * S, N = blocks, P = reads of a block for a row, G = key/value heads, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.aliases import Ints
from ...core.plan.step_plan import Slice
from .block_tables import BlockTables
from .copy_rows import copy_rows

Pools = tuple[Tensor, Tensor]
"""Keys and values of a layer, [N, S, G, D] each; on the CPU the tokens of a head lie side by side."""


_MOST_IN_PLACE = 2
"""Blocks of a pool for each that is read, above which these are gathered."""
_EVEN = 1.25
"""Blocks of padded rows for each that is read, up to which rows are gathered to be padded."""
_UNREAD = 1 << 60
"""The first token of a block that nobody reads, after all others."""


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


class BlockReads(NamedTuple):
    """The blocks that rows of one token attend to: the first ones of the pool where they lie, each for one row at most,
    and then some that are gathered."""

    num_in_place: int
    gathered_E: Tensor
    """int64; blocks that several rows share, again for each but one; all blocks, where few of the pool are read."""
    rows_P: Tensor
    """int64; of each read its row."""


@dataclass(frozen=True, eq=False)
class CachedRows:
    """What the slices of a forward have in a cache: those of several tokens first, then rows of one token each."""

    cache: KvCache
    slices: tuple[Slice, ...]
    device: torch.device
    _seen: dict[int | None, Tensor] = field(default_factory=dict)
    _unseen: dict[int | None, Tensor] = field(default_factory=dict)
    _by_head: dict[int, Tensor] = field(default_factory=dict)

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
    def tables(self) -> tuple[Tensor, Tensor]:
        """int32; blocks [B, W] of the rows of one token, any block after the last one of a row, and keys [B] that each
        sees, its own included."""
        arrays = {"tables": self._tables_BW.astype(np.int32), "lengths": self._stops.astype(np.int32)}
        on_device = copy_rows(arrays, self.device)
        return on_device["tables"], on_device["lengths"]

    @cached_property
    def places_2T(self) -> Tensor:
        """int64; the block, and the place in it, of each token's keys."""
        size = self.cache.tables.block_tokens
        places = np.stack([self._blocks[np.cumsum(self._sizes) - 1], (self._stops - 1) % size])
        if self.long:
            places = np.concatenate([*map(self._places, self.long), places], 1)
        return copy_rows({"places": places}, self.device)["places"]

    def blocks_of(self, piece: Slice) -> Tensor:
        """int64; the blocks of the tokens up to the end of a slice."""
        tables = self.cache.tables
        blocks = np.array(tables[piece.sequence][: tables.size(piece.stop)], dtype=np.int64)
        return copy_rows({"blocks": blocks}, self.device)["blocks"]

    @cached_property
    def are_even(self) -> bool:
        """Whether rows have about as many blocks as the longest one."""
        return len(self._sizes) * int(self._sizes.max()) <= _EVEN * len(self._blocks)

    def tables_BGW(self, groups: int) -> Tensor:
        """int64; the blocks of each row by head, where a pool has the heads of a block one after the other."""
        if groups not in self._by_head:
            by_head = self._tables_BW[:, None] * groups + np.arange(groups)[:, None]
            self._by_head[groups] = copy_rows({"blocks": by_head}, self.device)["blocks"]
        return self._by_head[groups]

    def seen_B11L(self, window: int | None) -> Tensor:
        """Which keys of its blocks a row sees; in a window so many before its own. bool [B, 1, 1, L]."""
        if window not in self._seen:
            last_B1 = self._stops[:, None] - 1
            places_L = np.arange(self._tables_BW.shape[1] * self.cache.tables.block_tokens)
            seen_BL = places_L <= last_B1
            if window is not None:
                seen_BL &= places_L >= last_B1 - window
            self._seen[window] = copy_rows({"seen": seen_BL[:, None, None]}, self.device)["seen"]
        return self._seen[window]

    @cached_property
    def reads(self) -> BlockReads:
        """Which blocks are read for which rows."""
        rows = {name: self._reads[name] for name in ("gathered_E", "rows_P")}
        return BlockReads(self._num_in_place, **copy_rows(rows, self.device))

    def unseen_P1S(self, window: int | None) -> Tensor:
        """Which keys of its blocks a row does not see; in a window those before it too. bool."""
        if window not in self._unseen:
            last_P = self._stops[self._reads["rows_P"]] - 1
            places_PS = self._reads["firsts_P"][:, None] + np.arange(self.cache.tables.block_tokens)
            unseen_PS = places_PS > last_P[:, None]
            if window is not None:
                unseen_PS |= places_PS < last_P[:, None] - window
            self._unseen[window] = copy_rows({"unseen": unseen_PS[:, None]}, self.device)["unseen"]
        return self._unseen[window]

    @cached_property
    def _stops(self) -> Ints:
        """Keys that each row of one token sees, its own included."""
        return np.array([piece.stop for piece in self.slices[len(self.long) :]], dtype=np.int64)

    @cached_property
    def positions_T(self) -> Ints:
        """The place of each token in its sequence."""
        return np.concatenate([*(np.arange(piece.start, piece.stop) for piece in self.long), self._stops - 1])

    @cached_property
    def _sizes(self) -> Ints:
        """Blocks of each of these rows."""
        return -(-self._stops // self.cache.tables.block_tokens)

    @cached_property
    def _blocks(self) -> Ints:
        """The blocks of one row after those of another."""
        tables, rows = self.cache.tables, self.slices[len(self.long) :]
        own = [tables[piece.sequence][:size] for piece, size in zip(rows, self._sizes.tolist(), strict=True)]
        return np.array([*chain.from_iterable(own)], dtype=np.int64)

    @cached_property
    def _tables_BW(self) -> Ints:
        tables_BW = np.zeros((len(self._sizes), self._sizes.max(initial=0)), dtype=np.int64)
        tables_BW[np.arange(tables_BW.shape[1]) < self._sizes[:, None]] = self._blocks
        return tables_BW

    @cached_property
    def _num_in_place(self) -> int:
        """Blocks of the pool that are read where they lie, or not at all."""
        blocks = self.cache.tables.num_blocks
        return blocks if blocks <= _MOST_IN_PLACE * len(self._blocks) else 0

    @cached_property
    def _reads(self) -> dict[str, Ints]:
        """What `BlockReads` has; and of each read the place of its first token in the sequence."""
        sizes, blocks, count = self._sizes, self._blocks, self._num_in_place
        order, again = np.arange(len(blocks)), np.ones(len(blocks), dtype=bool)
        of_rows = np.repeat(np.arange(len(sizes)), sizes)
        firsts = (order - np.repeat(np.cumsum(sizes) - sizes, sizes)) * self.cache.tables.block_tokens
        rows_N, firsts_N = np.zeros(count, np.int64), np.full(count, _UNREAD, np.int64)
        if count:
            last = np.empty(count, np.int64)
            last[blocks] = order
            again = last[blocks] != order
            rows_N[blocks[~again]], firsts_N[blocks[~again]] = of_rows[~again], firsts[~again]
        return {
            "gathered_E": blocks[again],
            "rows_P": np.concatenate([rows_N, of_rows[again]]),
            "firsts_P": np.concatenate([firsts_N, firsts[again]]),
        }

    def _places(self, piece: Slice) -> Ints:
        tokens, size = np.arange(piece.start, piece.stop), self.cache.tables.block_tokens
        blocks = np.array(self.cache.tables[piece.sequence], dtype=np.int64)
        return np.stack([blocks[tokens // size], tokens % size])
