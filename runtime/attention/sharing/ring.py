"""Keys and values of the other groups come by one after the other: a ring, the ring of a hybrid, or no hop at all.

What a group brings of a slice lies as [tokens of earlier slices, its chunk j, its chunk 2g - 1 - j]. So group i needs
no mask but the causal one of its own tokens:

    own (j = i)     all its queries over all keys, causal (bottom-right)
    j < i           all its queries over the earlier tokens and the first chunk
    j > i           queries of its second chunk over all keys, those of the first over the earlier tokens

A ring of g groups has g - 1 hops forward. Backward, keys and values go the same way, and dK and dV, in float32 at
least, follow one block behind and take one hop more, back to their group. The next hop is posted
before the block is computed (Ring Attention with blockwise transformers, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .jobs import GroupTokens
from .running_job import Pair, RunningJob, Tile, Transfer


def tiles(group: int, visitor: int, group_tokens: Sequence[GroupTokens]) -> list[Tile]:
    """What a group computes of one slice while a visitor's keys are there."""
    own, theirs = group_tokens[group], group_tokens[visitor]
    if visitor == group:
        candidates = [Tile(0, own.own, theirs.all, True)]
    elif visitor < group:
        candidates = [Tile(0, own.own, theirs.before + theirs.first, False)]
    else:
        candidates = [Tile(0, own.first, theirs.before, False), Tile(own.first, own.own, theirs.all, False)]
    return [tile for tile in candidates if tile.end > tile.first and tile.keys]


class Ring(RunningJob):
    """Hop h brings what the group h places before this one holds."""

    def forward(self) -> Iterator[None]:
        keys = self.own_keys()
        message = self.packed(keys) if self.groups > 1 else None
        done: list[Pair | None] = [None] * len(keys)
        for hop in range(self.groups):
            coming = None
            if message is not None and hop + 1 < self.groups:
                coming = self._pass_on(message, hop, 0)
                yield
            for number, part in enumerate(self.job.parts):
                now = tiles(self.group, self._visitor(hop), part.group_tokens)
                done[number] = self.forward_tiles(number, now, keys[number], done[number])
            if coming is not None:
                message = coming()
                keys = self.unpacked(message, self._visitor(hop + 1))
        self.finish(done)

    def backward(self, dout_NHD: Tensor) -> Iterator[None]:
        keys = self.own_keys(backward=True)
        dq_NHD = torch.zeros_like(self.q_NHD, dtype=self.wide)
        if self.groups == 1:  # slice by slice: of each, gradients for all tokens before it are there
            wanted = [tiles(0, 0, part.group_tokens) for part in self.job.parts]
            rows = enumerate(zip(wanted, keys, strict=True))
            self.settle(dq_NHD, (self.backward_tiles(n, own, pair, dout_NHD, dq_NHD, None) for n, (own, pair) in rows))
            return
        message, going = self.packed(keys), None
        for hop in range(self.groups):
            coming = None
            if hop + 1 < self.groups:
                coming = self._pass_on(message, hop, 0)
                yield
            grads = torch.zeros_like(message, dtype=self.wide)
            sums = self.unpacked(grads, self._visitor(hop))
            for number, part in enumerate(self.job.parts):
                now = tiles(self.group, self._visitor(hop), part.group_tokens)
                self.backward_tiles(number, now, keys[number], dout_NHD, dq_NHD, sums[number])
            if going is not None:
                grads += going()
            going = self._pass_on(grads, hop, 1)
            if coming is not None:
                message = coming()
                keys = self.unpacked(message, self._visitor(hop + 1))
        assert going is not None
        yield
        self.settle(dq_NHD, self.unpacked(going(), self.group))

    def _visitor(self, hop: int) -> int:
        return (self.group - hop) % self.groups

    def _pass_on(self, message: Tensor, hop: int, kind: int) -> Callable[[], Tensor]:
        """Send what is here to the next group; the answer waits for what the group before this one has."""
        after = [(group + 1) % self.groups for group in range(self.groups)]
        rows = [
            Transfer(group, after[group], self.job.keys_of((group - hop) % self.groups)) for group in range(self.groups)
        ]
        coming = self.exchange(rows, {after[self.group]: message}, hop, kind)
        return lambda: coming()[(self.group - 1) % self.groups]
