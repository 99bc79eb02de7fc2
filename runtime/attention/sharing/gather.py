"""The cp_comm in which every rank of a CP group gets the keys and values of all others at once.

Of a slice there are then the tokens of earlier slices, rank by rank, and the slice's chunks in their order; a rank's
two chunks of queries see all of the former and the latter up to themselves, which is a causal block each. Backward
gathers keys and values anew and sends every rank its part of dK and dV, in float32 at least (context parallelism of
Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import permutations

import torch
from torch import Tensor

from .jobs import JobSlice
from .running_job import Pair, RunningJob, Tile, Transfer


def tiles(group: int, part: JobSlice) -> list[Tile]:
    """What a rank computes of one slice, over keys in the order of `_in_order`."""
    groups, own = part.group_tokens, part.group_tokens[group]
    before = sum(tokens.before for tokens in groups)
    chunks = [*(tokens.first for tokens in groups), *(tokens.second for tokens in reversed(groups))]
    first, second = before + sum(chunks[: group + 1]), before + sum(chunks[: len(chunks) - group])
    both = Tile(0, own.first, first, True), Tile(own.first, own.own, second, True)
    return [tile for tile in both if tile.end > tile.first]


class Gather(RunningJob):
    """A job whose CP group shares no heads and has several ranks."""

    def forward(self) -> Iterator[None]:
        keys = yield from self._gathered()
        self.finish([self._attended(n, part, keys[n]) for n, part in enumerate(self.job.parts)])

    def backward(self, dout_NHD: Tensor) -> Iterator[None]:
        keys = yield from self._gathered(backward=True)
        dq_NHD = torch.zeros_like(self.q_NHD, dtype=self.wide)
        parts = enumerate(self.job.parts)
        sums = [self.backward_tiles(n, tiles(self.group, part), keys[n], dout_NHD, dq_NHD, None) for n, part in parts]
        shares = [self._share_of(group, sums) for group in range(self.groups)]
        total = shares[self.group]
        rows = [Transfer(source, to, self.job.keys_of(to)) for source, to in permutations(range(self.groups), 2)]
        going = self.exchange(rows, {group: shares[group] for group in self._others}, 0, 1)
        yield
        for _, share in sorted(going().items()):
            total += share
        self.settle(dq_NHD, self.unpacked(total, self.group))

    def _attended(self, number: int, part: JobSlice, keys: Pair) -> Pair | None:
        done = [self.forward_tiles(number, [tile], keys, None) for tile in tiles(self.group, part)]
        outs, lses = [pair[0] for pair in done if pair], [pair[1] for pair in done if pair]
        return (torch.cat(outs), torch.cat(lses, dim=1)) if outs else None

    @property
    def _others(self) -> list[int]:
        return [group for group in range(self.groups) if group != self.group]

    def _gathered(self, backward: bool = False) -> Generator[None, None, list[Pair]]:
        """Keys and values of each slice in the order of `tiles`."""
        message = self.packed(self.own_keys(backward))
        rows = [Transfer(source, to, self.job.keys_of(source)) for source, to in permutations(range(self.groups), 2)]
        coming = self.exchange(rows, dict.fromkeys(self._others, message), 0, 0)
        yield
        messages = {**coming(), self.group: message}
        brought = [self.unpacked(messages[group], group) for group in range(self.groups)]
        assembled = []
        for number, part in enumerate(self.job.parts):
            k, v = (_in_order([pairs[number][i] for pairs in brought], part) for i in (0, 1))
            assembled.append((k, v))
        return assembled

    def _share_of(self, group: int, sums: Sequence[Pair]) -> Tensor:
        """The gradients of what a group brought, in the order of its message."""
        rows = [
            [_of_group(total, part, group) for part, total in zip(self.job.parts, totals, strict=True)]
            for totals in zip(*sums, strict=True)
        ]
        return torch.stack([torch.cat([piece for pieces in row for piece in pieces]) for row in rows]).to(self.wide)


def _in_order(brought: Sequence[Tensor], part: JobSlice) -> Tensor:
    """Earlier tokens group by group, then the slice's own from its first to its last."""
    sizes = [list(tokens) for tokens in part.group_tokens]
    split = [torch.split(x, size) for x, size in zip(brought, sizes, strict=True)]
    before, first, second = zip(*split, strict=True)
    return torch.cat([*before, *first, *reversed(second)])


def _of_group(total: Tensor, part: JobSlice, group: int) -> tuple[Tensor, Tensor, Tensor]:
    befores, firsts, seconds = zip(*part.group_tokens, strict=True)
    before, first = sum(befores[:group]), sum(befores) + sum(firsts[:group])
    second = sum(befores) + sum(firsts) + sum(seconds[group + 1 :])
    starts = (before, befores), (first, firsts), (second, seconds)
    a, b, c = (total[start : start + sizes[group]] for start, sizes in starts)
    return a, b, c
