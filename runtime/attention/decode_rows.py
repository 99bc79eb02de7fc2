"""Rows of a few tokens that attend to blocks of a cache: which keys their queries see, and which blocks are read for
which row.

All queries of a row are at the end of its sequence, one after the other. Rows that are shorter than the longest one are
filled in front, with queries whose result nobody takes.

Shape legend: T = tokens of all rows, B = rows, Q = tokens of the longest row, W = blocks of the row with the most, S =
tokens of a block, L = W * S, N = blocks, P = reads of a block for a row, H = query heads, G = key/value heads, R = H /
G, Z = Q * R queries of a row to a key/value head, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...core.aliases import Ints
from ...core.plan.step_plan import Slice
from .block_tables import BlockTables
from .copy_rows import copy_rows

MOST_TOKENS = 16
"""Tokens of a row at most; slices of more attend one by one."""
_SIZES = 1, 4, MOST_TOKENS
"""Tokens up to which rows attend in one call, so that filling them costs little."""
_MOST_IN_PLACE = 2
"""Blocks of a pool for each that is read, above which these are gathered."""
_EVEN = 1.25
"""Blocks of padded rows for each that is read, up to which rows are gathered to be padded."""
_UNREAD = 1 << 60
"""The first token of a block that nobody reads, after all others."""


def size_class(piece: Slice) -> int:
    """Slices of one class attend in one call, those of the last one by one."""
    return sum(piece.length > size for size in _SIZES)


NO_ROW = len(_SIZES)
"""The class of slices that attend one by one."""


class BlockReads(NamedTuple):
    """The blocks that rows attend to: the first ones of the pool where they lie, each for one row at most, and then
    some that are gathered."""

    num_in_place: int
    gathered_E: Tensor
    """int64; blocks that several rows share, again for each but one; all blocks, where few of the pool are read."""
    rows_P: Tensor
    """int64; of each read its row."""


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """Slices of `MOST_TOKENS` at most, which attend in one call. At least one."""

    block_tables: BlockTables
    slices: Sequence[Slice]
    device: torch.device
    _seen: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)
    _unseen: dict[int | None, Tensor] = field(default_factory=dict)
    _by_head: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row, Q."""
        return max(piece.length for piece in self.slices)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all rows, T."""
        return sum(piece.length for piece in self.slices)

    def filled(self, x_THD: Tensor) -> Tensor:
        """The tokens of rows [B, Q, H, D], zeros in front of shorter ones."""
        shape = len(self.slices), self.longest, *x_THD.shape[1:]
        if self._is_full:
            return x_THD.view(shape)
        return x_THD.new_zeros(shape).flatten(0, 1).index_copy_(0, self._slots_T, x_THD).view(shape)

    def taken(self, x_BQHD: Tensor) -> Tensor:
        """The tokens of filled rows, [T, H, D]."""
        x_XHD = x_BQHD.flatten(0, 1)
        return x_XHD if self._is_full else x_XHD.index_select(0, self._slots_T)

    @cached_property
    def places_2T(self) -> Ints:
        """The block, and the place in it, of each token's keys."""
        size = self.block_tables.block_tokens
        blocks_BQ = np.take_along_axis(self._tables_BW, self._places_BQ // size, 1)
        return np.stack([blocks_BQ[self._own_BQ], self.positions_T % size])

    @cached_property
    def positions_T(self) -> Ints:
        """The place of each token in its sequence."""
        return self._places_BQ[self._own_BQ]

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """int32; blocks [B, W] of rows, any block after the last one of a row, and keys [B] that the last query of each
        sees, its own included."""
        arrays = {"tables": self._tables_BW.astype(np.int32), "lengths": self._stops.astype(np.int32)}
        on_device = copy_rows(arrays, self.device)
        return on_device["tables"], on_device["lengths"]

    @cached_property
    def are_even(self) -> bool:
        """Whether rows have about as many blocks as the one with the most."""
        return len(self._sizes) * int(self._sizes.max()) <= _EVEN * len(self._blocks)

    def tables_BGW(self, groups: int) -> Tensor:
        """int64; the blocks of each row by head, where a pool has the heads of a block one after the other."""
        if groups not in self._by_head:
            by_head = self._tables_BW[:, None] * groups + np.arange(groups)[:, None]
            self._by_head[groups] = copy_rows({"blocks": by_head}, self.device)["blocks"]
        return self._by_head[groups]

    def seen_B1ZL(self, window: int | None, heads: int) -> Tensor:
        """Which keys of its blocks a query sees; in a window so many before its own. bool; Z is 1 where all queries of
        a row see the same.

        Args:
            heads: R.
        """
        if (window, heads) not in self._seen:
            last_BQ1 = self._places_BQ[..., None]
            places_L = np.arange(self._tables_BW.shape[1] * self.block_tables.block_tokens)
            seen_BQL = places_L <= last_BQ1
            if window is not None:
                seen_BQL &= places_L >= last_BQ1 - window
            seen_BZL = seen_BQL if self.longest == 1 else seen_BQL.repeat(heads, axis=1)
            self._seen[window, heads] = copy_rows({"seen": seen_BZL[:, None]}, self.device)["seen"]
        return self._seen[window, heads]

    @cached_property
    def reads(self) -> BlockReads:
        """Which blocks are read for which rows."""
        rows = {name: self._reads[name] for name in ("gathered_E", "rows_P")}
        return BlockReads(self._num_in_place, **copy_rows(rows, self.device))

    def unseen_P1Q1S(self, window: int | None) -> Tensor:
        """Which keys of its blocks a query does not see; in a window those before it too. bool."""
        if window not in self._unseen:
            last_PQ1 = self._places_BQ[self._reads["rows_P"]][..., None]
            places_P1S = (self._reads["firsts_P"][:, None] + np.arange(self.block_tables.block_tokens))[:, None]
            unseen_PQS = places_P1S > last_PQ1
            if window is not None:
                unseen_PQS |= places_P1S < last_PQ1 - window
            self._unseen[window] = copy_rows({"unseen": unseen_PQS[:, None, :, None]}, self.device)["unseen"]
        return self._unseen[window]

    @cached_property
    def _is_full(self) -> bool:
        return self.num_tokens == len(self.slices) * self.longest

    @cached_property
    def _stops(self) -> Ints:
        """Keys that the last query of each row sees, its own included."""
        return np.array([piece.stop for piece in self.slices], dtype=np.int64)

    @cached_property
    def _places_BQ(self) -> Ints:
        """The place of each query in its sequence; of what rows are filled with it is one that is there."""
        places_BQ: Ints = np.maximum(self._stops[:, None] - self.longest + np.arange(self.longest), 0)
        return places_BQ

    @cached_property
    def _own_BQ(self) -> npt.NDArray[np.bool_]:
        """Which queries are tokens of rows."""
        lengths = np.array([piece.length for piece in self.slices])
        return np.arange(self.longest) >= self.longest - lengths[:, None]

    @cached_property
    def _slots_T(self) -> Tensor:
        """int64; where each token is among filled rows."""
        return copy_rows({"slots": np.flatnonzero(self._own_BQ)}, self.device)["slots"]

    @cached_property
    def _sizes(self) -> Ints:
        """Blocks that each row reads."""
        return -(-self._stops // self.block_tables.block_tokens)

    @cached_property
    def _blocks(self) -> Ints:
        """The blocks of one row after those of another."""
        tables = self.block_tables
        own = [tables[piece.sequence][:size] for piece, size in zip(self.slices, self._sizes.tolist(), strict=True)]
        return np.array([*chain.from_iterable(own)], dtype=np.int64)

    @cached_property
    def _tables_BW(self) -> Ints:
        tables_BW = np.zeros((len(self._sizes), self._sizes.max()), dtype=np.int64)
        tables_BW[np.arange(tables_BW.shape[1]) < self._sizes[:, None]] = self._blocks
        return tables_BW

    @cached_property
    def _num_in_place(self) -> int:
        """Blocks of the pool that are read where they lie, or not at all."""
        blocks = self.block_tables.num_blocks
        return blocks if blocks <= _MOST_IN_PLACE * len(self._blocks) else 0

    @cached_property
    def _reads(self) -> dict[str, Ints]:
        """What `BlockReads` has; and of each read the place of its first token in the sequence."""
        sizes, blocks, count = self._sizes, self._blocks, self._num_in_place
        order, again = np.arange(len(blocks)), np.ones(len(blocks), dtype=bool)
        of_rows = np.repeat(np.arange(len(sizes)), sizes)
        firsts = (order - np.repeat(np.cumsum(sizes) - sizes, sizes)) * self.block_tables.block_tokens
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
