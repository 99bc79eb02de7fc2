"""Keys and values of sequences that grow token by token, in blocks, without gradients.

What `PrefixStore` is to the slices of a step, this is to the tokens of a generation: they stay from one forward to the
next, until their sequence ends. `CachedRows` is what one forward reads and writes of it, and travels with its pack.

Shape legend: T = tokens of a forward, S = tokens of a block, N = blocks, G = key/value heads, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, groupby

import numpy as np
import torch
from torch import Tensor

from ...core.aliases import Ints
from ...core.plan.step_plan import Slice
from .block_tables import BlockTables
from .copy_rows import copy_rows
from .decode_rows import NO_ROW, DecodeRows, size_class
from .rounded_keys import KeyBits, restored_keys, rounded_keys

Pools = tuple[Tensor, Tensor]
"""Keys and values of a layer, [N, S, G, D] each; on the CPU the tokens of a head lie side by side."""


class KvCache:
    """The keys and values of one rank, by layer, in the blocks of ``tables``.

    Args:
        bits: to which they are rounded; None: they are kept as they are.
    """

    def __init__(self, tables: BlockTables, bits: KeyBits | None = None) -> None:
        self.tables = tables
        self._bits = bits
        self._kept: dict[int, list[Tensor]] = {}
        """By layer, the pools of keys and values; or of the integers and the ranges of each."""

    def write(self, layer: int, rows: CachedRows, k_TGD: Tensor, v_TGD: Tensor) -> Pools:
        """Keep the keys and values of some rows where they belong; all of the layer."""
        values = (
            [k_TGD, v_TGD] if self._bits is None else [*chain(*(rounded_keys(x, self._bits) for x in (k_TGD, v_TGD)))]
        )
        kept = self._kept.get(layer)
        if kept is None or len(kept[0]) < self.tables.num_blocks:
            kept = self._kept[layer] = self._grown(kept, values)
        for pool, new in zip(kept, values, strict=True):
            pool[rows.places_2T[0], rows.places_2T[1]] = new[: rows.places_2T.shape[1]].to(pool.dtype)
        if self._bits is None:
            return kept[0], kept[1]
        k, of_k, v, of_v = (pool[: self.tables.num_blocks] for pool in kept)
        return restored_keys(k, of_k, self._bits, k_TGD.dtype), restored_keys(v, of_v, self._bits, v_TGD.dtype)

    def copy_block(self, source: int, target: int) -> None:
        """Write what a block holds into another one, in all layers."""
        for layer, kept in self._kept.items():
            if target >= len(kept[0]):
                kept = self._kept[layer] = self._grown(kept, [pool[0] for pool in kept])
            for pool in kept:
                pool[target] = pool[source]

    def _grown(self, kept: Sequence[Tensor] | None, values: Sequence[Tensor]) -> list[Tensor]:
        """Twice as many blocks as are wanted, so that growing costs a copy of each a few times; zeros where nothing was
        written, for a weight of 0 times what memory may hold need not be 0."""
        wanted, size = self.tables.at_most(2 * self.tables.num_blocks), self.tables.block_tokens
        new = []
        for of_TGX in values:
            _, groups, width = of_TGX.shape
            if of_TGX.device.type == "cpu":
                new.append(of_TGX.new_zeros(wanted, groups, size, width).transpose(1, 2))
            else:
                new.append(of_TGX.new_zeros(wanted, size, groups, width))
        for pool, old in zip(new, kept or (), strict=False):
            pool[: len(old)] = old
        return new


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
