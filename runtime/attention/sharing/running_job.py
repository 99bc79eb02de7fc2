"""One job of a shared micro-batch on one of its ranks, in one attention call: what every cp_comm has in common.

Shape legend: N = tokens that this rank attends for, M = tokens whose keys a group brings, H = query heads,
G = key/value heads (both of this rank), D = head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ....core.plan.step_plan import CpComm
from ...world.plane import FIRST_TAG, Pending, Plane
from ..blocks import BlockKernel, Inputs, merge, with_sinks
from ..prefix import PrefixStore
from .jobs import CpGroupJob, Heads, heads_of
from .routing import PendingLegs, RankMessage

Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients."""

Arrival = Callable[[], Mapping[int, Tensor]]
"""Waits for messages that are under way to this rank, and gives them: [2, M, G, D] by the group that sent it."""

_TAGS_PER_JOB = 4096


class AttentionCall(NamedTuple):
    """What all jobs of an attention call know."""

    plane: Plane
    store: PrefixStore | None
    layer: int
    scale: float
    block: BlockKernel
    frozen: bool
    """No backward will come: autograd is on, and neither queries nor keys nor values need gradients."""
    num_heads: tuple[int, int]
    """Of queries and of keys, of all ranks that share them."""
    cp_comm: CpComm
    routed: bool
    window: int | None = None
    """Tokens before its own that a query sees; only where no keys come from other ranks."""
    softcap: float | None = None
    """See `Inputs.softcap`."""
    sinks_H: Tensor | None = None
    """The score of no key, of each query head of all ranks; None: there is none."""


class Tile(NamedTuple):
    """Queries first .. end-1 of a slice over the first keys of what is there of it."""

    first: int
    end: int
    keys: int
    causal: bool


class Transfer(NamedTuple):
    """A message from one group of a CP group to another."""

    source: int
    to: int
    tokens: int


class RunningJob(ABC):
    """A job with its tensors in the attention layout; `forward` fills out and lse, `backward` grads.

    Both are generators that yield when messages were posted, so that the jobs of a call take turns.
    """

    def __init__(self, call: AttentionCall, job: CpGroupJob, heads: Heads, q_NHD: Tensor, kv_NGD: Pair | None) -> None:
        self.call = call
        self.job = job
        self.heads = heads
        self.q_NHD = q_NHD
        self._kv_NGD = kv_NGD
        place = job.cp_group.ranks.index(call.plane.rank)
        self.groups, self.group = job.cp_group.groups, place // job.cp_group.ulysses_degree
        self.share = place % job.cp_group.ulysses_degree
        self.lengths = [part.group_tokens[self.group].own for part in job.parts]
        self._starts = list(accumulate(self.lengths, initial=0))
        self.wide = torch.promote_types(q_NHD.dtype, torch.float32)
        self.out_NHD = self.lse_HN = q_NHD
        self.grads: tuple[Tensor, Tensor, Tensor] = q_NHD, q_NHD, q_NHD
        """dq_NHD, dk_NGD, dv_NGD."""

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """What the backward needs; keys and values of cut sequences are in the store."""
        kept = self._kv_NGD if self._kv_NGD and not all(part.cut for part in self.job.parts) else ()
        return self.q_NHD, self.out_NHD, self.lse_HN, *kept

    @classmethod
    def restored(cls, call: AttentionCall, job: CpGroupJob, heads: Heads, saved: Sequence[Tensor]) -> RunningJob:
        """The job for its backward."""
        q_NHD, out_NHD, lse_HN, *kept = saved
        work = cls(call, job, heads, q_NHD, (kept[0], kept[1]) if kept else None)
        work.out_NHD, work.lse_HN = out_NHD, lse_HN
        return work

    @abstractmethod
    def forward(self) -> Iterator[None]: ...

    @abstractmethod
    def backward(self, dout_NHD: Tensor) -> Iterator[None]: ...

    def exchange(self, rows: Sequence[Transfer], sends: Mapping[int, Tensor], hop: int, kind: int) -> Arrival:
        """Post messages between groups.

        Args:
            rows: all messages of the hop, the same on every rank of the CP group.
            sends: [2, M, G, D] for each group that gets one from this rank's.
            kind: 0 or 1; tells messages of one hop apart.
        """
        like, ulysses_degree = next(iter(sends.values())), self.job.cp_group.ulysses_degree
        came = {row.source: like.new_empty(2, row.tokens, *like.shape[2:]) for row in rows if row.to == self.group}
        tags = [
            FIRST_TAG + 8 + self.job.number * _TAGS_PER_JOB + (6 * hop + 3 * kind + i) % _TAGS_PER_JOB for i in range(3)
        ]
        plane, ranks = self.call.plane, self.job.cp_group.ranks
        if not (self.call.routed and plane.node_ranks):
            outgoing = [(ranks[group * ulysses_degree + self.share], tensor) for group, tensor in sends.items()]
            incoming = [(ranks[group * ulysses_degree + self.share], tensor) for group, tensor in came.items()]
            return partial(_arrived, plane.post(outgoing, incoming, tags[0]), came)
        messages: list[RankMessage] = []
        ends: dict[int, Tensor] = {}
        for row in rows:
            for share in range(ulysses_degree):
                heads = heads_of(share, ulysses_degree, *self.call.num_heads).keys
                size = 2 * row.tokens * (heads.stop - heads.start) * like.shape[-1]
                if share == self.share and self.group in (row.source, row.to):
                    ends[len(messages)] = sends[row.to] if row.source == self.group else came[row.source]
                messages.append(
                    RankMessage(
                        ranks[row.source * ulysses_degree + share], ranks[row.to * ulysses_degree + share], size
                    )
                )
        return partial(_arrived, PendingLegs(plane, messages, ranks, ends, tags, like), came)

    def own_keys(self, backward: bool = False) -> list[Pair]:
        """Keys and values that this rank brings, slice by slice; those of cut sequences are written to the store."""
        own: list[Sequence[Tensor]] = [[self.q_NHD[:0]] * len(self.lengths)] * 2
        if self._kv_NGD is not None:
            own = [torch.split(x, self.lengths) for x in self._kv_NGD]
        pairs = []
        for part, k_NGD, v_NGD in zip(self.job.parts, *own, strict=True):
            if not part.cut:
                pairs.append((k_NGD, v_NGD))
            elif backward:
                pairs.append(self._store.read(self.call.layer, self._store.local(part.piece)))
            else:
                local = self._store.local(part.piece)
                pairs.append(self._store.write(self.call.layer, local, k_NGD, v_NGD, frozen=self.call.frozen))
        return pairs

    def packed(self, keys: Sequence[Pair]) -> Tensor:
        """One message [2, M, G, D] of what this rank brings of all slices."""
        message = keys[0][0].new_empty(2, self.job.keys_of(self.group), *keys[0][0].shape[1:])
        for pair, places in zip(keys, self.unpacked(message, self.group), strict=True):
            for tensor, place in zip(pair, places, strict=True):
                place.copy_(tensor)
        return message

    def unpacked(self, message_2MGD: Tensor, group: int) -> list[Pair]:
        """Views of each slice in what a group brings."""
        sizes = [part.group_tokens[group].all for part in self.job.parts]
        return list(zip(*(torch.split(x, sizes) for x in message_2MGD), strict=True))

    def forward_tiles(self, number: int, tiles: Sequence[Tile], keys: Pair, done: Pair | None) -> Pair | None:
        """Attention of a slice over what is there of it, merged with what is done: out and lse."""
        for tile in tiles:
            more = self.call.block.forward(self._inputs(number, tile, keys))
            if done is None:
                done = more
            else:
                out_NHD, lse_HN = done[0].to(done[1].dtype), done[1]  # rounded once, at the end
                merged = merge(out_NHD[tile.first : tile.end], lse_HN[:, tile.first : tile.end], *more)
                out_NHD[tile.first : tile.end], lse_HN[:, tile.first : tile.end] = merged
                done = out_NHD, lse_HN
        return done

    def finish(self, done: Sequence[Pair | None]) -> None:
        """Set outputs and LSE of the job by those of its slices, in their order."""
        outs, lses = zip(*(pair or self._nothing() for pair in done), strict=True)
        self.lse_HN = lses[0] if len(lses) == 1 else torch.cat(lses, dim=1)
        out_NHD = joined(outs)
        if self.sinks_H is not None:
            out_NHD, self.lse_HN = with_sinks(out_NHD, self.lse_HN, self.sinks_H)
        self.out_NHD = out_NHD.to(self.q_NHD.dtype)

    def backward_tiles(
        self, number: int, tiles: Sequence[Tile], keys: Pair, dout_NHD: Tensor, dq_NHD: Tensor, sums: Pair | None
    ) -> Pair:
        """Add the gradients of a slice over what is there of it to dq and to those of the keys and values. ``sums``: in
        float32 at least; None: there are none yet."""
        first = self._starts[number]
        lse_HN = self.lse_HN[:, first : self._starts[number + 1]]
        for tile in tiles:
            rows = slice(first + tile.first, first + tile.end)
            inputs = self._inputs(number, tile, keys)
            dq, *dkv = self.call.block.backward(
                dout_NHD[rows], inputs, self.out_NHD[rows], lse_HN[:, tile.first : tile.end]
            )
            dq_NHD[rows] += dq
            dk, dv = (self.heads.folded(grad) for grad in dkv)
            if sums is None and len(tiles) == 1 and len(dk) == len(keys[0]):
                sums = dk, dv
                continue
            sums = sums or self._zeros(keys)
            sums[0][tile.keys - len(dk) : tile.keys] += dk
            sums[1][tile.keys - len(dv) : tile.keys] += dv
        return sums or self._zeros(keys)

    def settle(self, dq_NHD: Tensor, sums: Iterable[Pair]) -> None:
        """Book what is for earlier slices; the rest are the gradients of this rank's own keys and values."""
        own = []
        for part, pair in zip(self.job.parts, sums, strict=True):
            if part.cut:
                pair = self._store.settle(self.call.layer, self._store.local(part.piece), *pair)
            own.append(pair)
        dk, dv = (joined(row) for row in zip(*own, strict=True))
        self.grads = dq_NHD, dk, dv

    def _zeros(self, keys: Pair) -> Pair:
        return torch.zeros_like(keys[0], dtype=self.wide), torch.zeros_like(keys[1], dtype=self.wide)

    def _inputs(self, number: int, tile: Tile, keys: Pair) -> Inputs:
        first = self._starts[number]
        window, begin = self.call.window, 0
        if window is not None:  # what lies before the window of the first query adds nothing
            begin = max(0, tile.keys - (tile.end - tile.first) - window)
        k_MGD, v_MGD = (self.heads.spread(x[begin : tile.keys]) for x in keys)
        queries = self.q_NHD[first + tile.first : first + tile.end]
        return Inputs(queries, k_MGD, v_MGD, tile.causal, self.call.scale, window, self.call.softcap)

    def _nothing(self) -> Pair:
        return self.q_NHD[:0], self.q_NHD.new_empty(self.q_NHD.shape[1], 0, dtype=self.wide)

    @property
    def sinks_H(self) -> Tensor | None:
        """Sinks of the heads that this rank attends for."""
        return None if self.call.sinks_H is None else self.call.sinks_H[self.heads.queries]

    @property
    def _store(self) -> PrefixStore:
        assert self.call.store is not None
        return self.call.store


def _arrived(pending: Pending | PendingLegs, tensors: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    pending.wait()
    return tensors


def in_turn(works: Sequence[Iterator[None]]) -> None:
    """Run the jobs of a call to their ends, each for a hop at a time, in their order."""
    end = object()
    while works:
        works = [work for work in works if next(work, end) is not end]


def joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
