"""Reports of a loop's loss function, given back for the micro-batches that the loop knows.

A loss function reports for each pack; what a loop prints is made of one report for each of *its* micro-batches. Where a
value of a report is a pack's (sum of token losses, number of tokens), or their quotient, it is known for every sample,
and so for every micro-batch of the loop: those are assembled from the ranks that computed the samples. A report
with any other value stays the pack's own, and so do all of that call. A loss that is reported as it is, not a copy of
it, is divided by the number of micro-batches behind the function's back: Megatron's schedules divide in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .....runtime.attention.copy_rows import copy_rows, sent
from .....runtime.world.agreement import everyone, wire_device
from ..reading.context_parallel import CpShards
from ..reading.samples import UserPack

_SUM, _MEAN, _SHARE = "sum and count", "mean", "mean over the number of micro-batches"
Kinds = dict[str, tuple[str, Tensor]]
"""What each value of a report is, with one of its values for dtype and shape; empty where one is not known."""
_CLOSE = 1e-3
"""A loss function may compute in another precision than this module."""


class Reports:
    """Reports of one training call, on a rank of the last stage.

    Args:
        cp_shards: of the sequences of the step, over all ranks.
        kinds: what the values were in an earlier call, since a look at them waits for the device.
    """

    def __init__(self, cp_shards: CpShards, kinds: Kinds | None = None) -> None:
        self.kinds = kinds
        self._sums: Tensor | None = None
        """Of the token losses of each shard."""
        self._cp_shards = cp_shards
        self._packs: list[tuple[Tensor, Tensor, Any]] = []
        """(sum of token losses, number of tokens, report) of each pack."""
        self._shares: set[str] = set()
        """Keys of what is the loss itself."""
        self._known = True

    def add(self, packed: UserPack, losses: Tensor, answer: Sequence[Any]) -> None:
        """Take note of a pack: its token losses [1, T] (another shape: not known) and what its function returned."""
        loss_mask = sent(packed.fields["loss_mask"], losses.device)
        if losses.shape != loss_mask.shape:
            self._known = False
            return
        masked_T = (losses.detach().double() * loss_mask.double())[0]
        if self._sums is None:
            self._sums = masked_T.new_zeros(self._cp_shards.count)
        starts = zip(packed.pack.slices, packed.pack.segments, strict=False)
        parts = [(c, part, first + part.start - s.start) for s, first in starts for c, part in self._cp_shards.of(s)]
        if parts:
            ids = np.repeat([c for c, _, _ in parts], [p.length for _, p, _ in parts])
            own_T = torch.cat([masked_T[first : first + part.length] for _, part, first in parts])
            self._sums.index_add_(0, copy_rows({"ids": ids}, own_T.device)["ids"], own_T)
        self._packs.append((masked_T.sum(), loss_mask.double().sum(), _kept(answer[-1])))
        self._shares |= _same_storage(answer[0], answer[-1])

    def of_loop(
        self, reports: Sequence[Any], own: Sequence[Sequence[int]], targets: Sequence[float], group: Any
    ) -> Any:
        """What the loop gets: an entry for each of its micro-batches, or ``reports`` where a value is not known.
        Collective over ``group``, the data-parallel ranks.

        Args:
            reports: of all packs of this rank.
            own: the shards of each of the loop's micro-batches.
            targets: tokens with loss of each.
        """
        sums = self._sums
        if sums is None:
            sums = torch.zeros(self._cp_shards.count, dtype=torch.float64, device=wire_device(group))
        dist.all_reduce(sums, group=group)
        if self.kinds is None:
            self.kinds = self._agreed(self._kinds(reports), group)
        of_packs = [report for *_, report in self._packs]
        if not self.kinds or any(not isinstance(one, Mapping) or one.keys() != self.kinds.keys() for one in of_packs):
            return reports
        entries = []
        for places, num_targets in zip(own, targets, strict=True):
            total = sums[list(places)].sum()
            known = self.kinds.items()
            entries.append({key: _value(kind, like, total, num_targets, len(own)) for key, (kind, like) in known})
        return entries

    def _agreed(self, own: Kinds, group: Any) -> Kinds:
        """The kinds that this rank has found, where all ranks have found the same: a value can look like another one in
        the packs of one rank. Collective over ``group``."""
        of_ranks = everyone({key: kind for key, (kind, _) in own.items()}, group)
        return own if all(one == of_ranks[0] for one in of_ranks) else {}

    def _kinds(self, reports: Sequence[Any]) -> Kinds:
        first = self._packs[0][-1] if reports and self._known and len(self._packs) == len(reports) else None
        if not isinstance(first, Mapping) or not all(isinstance(value, Tensor) for value in first.values()):
            return {}
        kinds = {
            key: (_SUM if like.numel() == 2 else _SHARE if key in self._shares else _MEAN, like)
            for key, like in first.items()
        }
        for total, count, report in self._packs:
            # What a function says of no tokens, 0 / 0 perhaps, says nothing of its values.
            if count and not all(_matches(kind, report.get(key), total, count) for key, (kind, _) in kinds.items()):
                return {}
        return kinds


def _kept(report: Any) -> Any:
    if not isinstance(report, Mapping):
        return report
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in report.items()}


def _same_storage(loss: Any, report: Any) -> set[str]:
    if not isinstance(report, Mapping) or not isinstance(loss, Tensor):
        return set()
    return {k for k, v in report.items() if isinstance(v, Tensor) and v.data_ptr() == loss.data_ptr()}


def _matches(kind: str, value: Any, total: Tensor, count: Tensor) -> bool:
    if not isinstance(value, Tensor):
        return False
    expected = torch.stack([total, count]) if kind == _SUM else (total / count.clamp(min=1)).view(1)
    got = value.detach().double().view(-1).to(expected.device)
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=_CLOSE, atol=_CLOSE, equal_nan=True)


def _value(kind: str, like: Tensor, total: Tensor, count: float, num_micro_batches: int) -> Tensor:
    value = torch.stack([total, torch.full_like(total, count)]) if kind == _SUM else total / max(1.0, count)
    if kind == _SHARE:
        value = value / num_micro_batches
    return value.to(like.dtype).to(like.device).view(like.shape)
