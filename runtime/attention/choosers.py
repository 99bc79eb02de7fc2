"""Which blocks of keys a query block attends to where attention may leave some out: three ways to choose, as a table.

Shape legend: N = queries (the last of a sequence so far), M = keys, H = query heads, G = key/value heads, D = head
dimension, I = query blocks, J = key blocks before one, P = queries of a block times the heads of a group.

Blocks lie in a grid over the sequence, wherever a slice begins. A query block sees the keys from its own begin on
causally, always, and of the whole blocks before it those that are kept, the first always. ``mass`` is the share of the
softmax that they have together, over the queries of the block and the heads that share its keys; heads of other groups
have no say, so that a choice is the same however heads lie on ranks.

    sample     exact, of some queries by stride            SampleAttention, arXiv 2406.15486, section 4
    estimate   of products of 4 bits, by a threshold       SALE, arXiv 2505.24179, section 3
    kept       exact, of all queries, for later passes     AdaSpa, arXiv 2502.21079, section 4
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

STRIDE, WINDOW = 20, 0.08
"""SampleAttention's constants: one query in so many is looked at; this share of the keys, the last, is always kept."""
TAU, LEAST_TAU = 1.0, 1e-4
"""The threshold to begin with, and SALE's one below which everything is kept. SALE begins at 0.008, for 64 queries of
one head: among 512 of several heads some score is nearly always above that."""
_SCORES = 1 << 20
"""Scores that are held at once, such as stay in a cache. Masses of all blocks of 16,384 tokens, 4 heads over 2 of 32:
1.6 CPU s, with 1 << 24 at once 3.9."""


class Grid(NamedTuple):
    """The sizes of blocks, in tokens; that of queries is a multiple of that of keys."""

    queries: int = 512
    keys: int = 64


GRID = Grid()


class QueryBlock(NamedTuple):
    """The queries of a sequence that lie in one block of the grid."""

    first: int
    end: int
    """Their places among the N queries."""
    begin: int
    """Where the block begins in the sequence: keys before it are kept in blocks, those from it on are seen causally."""
    stop: int
    """Keys that the last of them sees."""

    def visible(self, places: range) -> list[int]:
        """How many keys from the block's begin on the queries at these places see."""
        return [self.stop - self.end + place + 1 - self.begin for place in places]


class BlockChoice(NamedTuple):
    """What a chooser reads: the queries and keys of one sequence, or of a slice with all before it."""

    q_NHD: Tensor
    k_MGD: Tensor
    scale: float
    mass: float
    grid: Grid = GRID

    @property
    def query_blocks(self) -> Iterator[QueryBlock]:
        """The blocks of the grid in which the queries lie, one after the other."""
        start, size = len(self.k_MGD) - len(self.q_NHD), self.grid.queries
        for begin in range(start // size * size, len(self.k_MGD), size):
            stop = min(begin + size, len(self.k_MGD))
            yield QueryBlock(max(begin - start, 0), stop - start, begin, stop)

    def empty(self) -> Tensor:
        """No block kept, bool [G, I, J] on the CPU, J those before the last query block."""
        blocks = list(self.query_blocks)
        return torch.zeros(self.k_MGD.shape[1], len(blocks), blocks[-1].begin // self.grid.keys, dtype=torch.bool)


class Chooser(NamedTuple):
    """One row of `CHOOSERS`, which says what is kept."""

    name: str
    choose: Callable[[BlockChoice], Tensor]
    """The kept blocks, bool [G, I, J]; what is not whole before its query block is not looked at."""
    keeps: bool = False
    """What it chooses in a dense pass is for later passes of the same sample."""


def sample(choice: BlockChoice) -> Tensor:
    """By the softmax of one query in `STRIDE`; a window of the last keys is kept besides."""
    return _by_mass(choice, STRIDE, WINDOW)


def kept(choice: BlockChoice) -> Tensor:
    """By the softmax of all queries: as few blocks as can have the mass."""
    return _by_mass(choice, 1, 0.0)


def estimate(choice: BlockChoice) -> Tensor:
    """By products of queries and keys in 4 bits, without their means (that of queries counts exactly): a block is kept
    where a score, relative to the softmax's sum over the first and the own block, is above a threshold, which is halved
    until the kept ones are estimated to have the mass."""
    chosen, size = choice.empty(), choice.grid.keys
    k_GMD = _wide(choice.k_MGD).transpose(0, 1)
    k_GMD = k_GMD - k_GMD.mean(1, keepdim=True)  # every score of a query is less by the same then
    rounded_GMD = in_4_bits(k_GMD)
    for number, block in enumerate(choice.query_blocks):
        if not block.begin:
            continue
        q_GPD = _by_group(choice.q_NHD[block.first : block.end], len(k_GMD)) * choice.scale
        seen_GMD = torch.cat([k_GMD[:, :size], k_GMD[:, block.begin : block.stop]], 1)
        exact_GPM = q_GPD @ seen_GMD.transpose(1, 2)
        _hide_future(exact_GPM[..., size:], block.visible(range(block.first, block.end)))
        mean_G1D, before = q_GPD.mean(1, keepdim=True), slice(size, block.begin)
        scores_GPM = in_4_bits(q_GPD - mean_G1D) @ rounded_GMD[:, before].transpose(1, 2)
        scores_GPM += mean_G1D @ k_GMD[:, before].transpose(1, 2) - exact_GPM.logsumexp(-1, keepdim=True)
        relative_GPM = scores_GPM.exp_()
        most_GJ = in_blocks(relative_GPM.amax(1), size).amax(-1)
        share_GM = (relative_GPM / (1 + relative_GPM.sum(-1, keepdim=True))).mean(1)
        share_GJ = in_blocks(share_GM, size).sum(-1)
        chosen[:, number, 0] = True
        chosen[:, number, 1 : block.begin // size] = _above(most_GJ, share_GJ, 1 - choice.mass).cpu()
    return chosen


def _above(most_GJ: Tensor, share_GJ: Tensor, spare: float) -> Tensor:
    """The blocks whose greatest score is above the first threshold at which no more than a spare share is left out."""
    tau = TAU
    keep_GJ = most_GJ > tau
    while tau >= LEAST_TAU and bool((short_G1 := (share_GJ * ~keep_GJ).sum(-1, keepdim=True) > spare).any()):
        tau /= 2
        keep_GJ |= short_G1 & ((most_GJ > tau) | (tau < LEAST_TAU))
    return keep_GJ


CHOOSERS = {
    row.name: row
    for row in (Chooser("sample", sample), Chooser("estimate", estimate), Chooser("kept", kept, keeps=True))
}


def fewest(mass_GJ: Tensor, always_J: Tensor, own_G: Tensor, mass: float) -> Tensor:
    """The fewest blocks, besides those always kept, that with ``own_G`` have this share of all: bool [G, J]."""
    free_GJ = mass_GJ.masked_fill(always_J, 0.0)
    begun_G1 = (own_G + (mass_GJ * always_J).sum(-1))[:, None]
    wanted_G1 = mass * (own_G + mass_GJ.sum(-1))[:, None]
    sorted_GJ, order_GJ = free_GJ.sort(-1, descending=True)
    taken_GJ = (begun_G1 + sorted_GJ.cumsum(-1) - sorted_GJ < wanted_G1) & (sorted_GJ > 0)
    return torch.zeros_like(taken_GJ).scatter(-1, order_GJ, taken_GJ) | always_J


def block_mass(choice: BlockChoice, block: QueryBlock, stride: int = 1) -> tuple[Tensor, Tensor]:
    """The softmax of the queries of a block, every ``stride``-th, summed over them and the heads of a group: by each
    key block before it [G, J], and over the keys from its begin on [G]."""
    k_GMD = _wide(choice.k_MGD[: block.stop]).transpose(0, 1)
    rows, total_GM = range(block.first, block.end, stride), k_GMD.new_zeros(k_GMD.shape[:2])
    step = max(1, _SCORES // (choice.q_NHD.shape[1] * block.stop))
    for part in (rows[at : at + step] for at in range(0, len(rows), step)):
        q_GPD = _by_group(choice.q_NHD[part.start : part.stop : stride], len(k_GMD)) * choice.scale
        scores_GPM = q_GPD @ k_GMD.transpose(1, 2)
        _hide_future(scores_GPM[..., block.begin :], block.visible(part))
        total_GM += scores_GPM.softmax(-1).sum(1)
    mass_GJ = in_blocks(total_GM[:, : block.begin], choice.grid.keys).sum(-1)
    return mass_GJ, total_GM[:, block.begin :].sum(-1)


def in_4_bits(x_GMD: Tensor) -> Tensor:
    """Rounded to 15 steps between the greatest magnitudes of each row."""
    step_GM1 = (x_GMD.abs().amax(-1, keepdim=True) / 7).clamp(min=torch.finfo(x_GMD.dtype).tiny)
    return (x_GMD / step_GM1).round() * step_GM1


def _by_mass(choice: BlockChoice, stride: int, window: float) -> Tensor:
    chosen, size = choice.empty(), choice.grid.keys
    for number, block in enumerate(choice.query_blocks):
        if not block.begin:
            continue
        mass_GJ, own_G = block_mass(choice, block, stride)
        always_J = torch.zeros(mass_GJ.shape[1], dtype=torch.bool, device=mass_GJ.device)
        always_J[0] = True
        always_J[len(always_J) - round(window * block.stop / size) :] = True
        chosen[:, number, : len(always_J)] = fewest(mass_GJ, always_J, own_G, choice.mass).cpu()
    return chosen


def _hide_future(own_GPM: Tensor, visible_N: list[int]) -> None:
    """Mask, in place, the keys from a block's begin on that its queries do not see."""
    heads = own_GPM.shape[1] // len(visible_N)
    visible_P1 = torch.tensor(visible_N, device=own_GPM.device).repeat_interleave(heads)[:, None]
    own_GPM.masked_fill_(torch.arange(own_GPM.shape[-1], device=own_GPM.device) >= visible_P1, -torch.inf)


def _by_group(q_NHD: Tensor, groups: int) -> Tensor:
    """[G, P, D], in float32 at least."""
    return _wide(q_NHD).reshape(len(q_NHD), groups, -1, q_NHD.shape[-1]).transpose(0, 1).flatten(1, 2)


def in_blocks(x_GM: Tensor, size: int) -> Tensor:
    """[G, J, keys of a block], of whole blocks."""
    return x_GM.reshape(len(x_GM), x_GM.shape[1] // size, size, *x_GM.shape[2:])


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
