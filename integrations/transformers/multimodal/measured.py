"""Whether samples change places with their pictures exactly: measured as packs and padded groups are (`proof`).

The two samples have pictures where there are two that have: the ones that are shortest up to a target behind the last
token of a picture. So what a picture gives to another sample shows in that sample's logits and in its loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....runtime.attention.pack import IGNORE, Pack
from ....runtime.world.agreement import everyone
from ..proof import Measurement
from .parts import PartForm, Parts, joined, tokens_standing_for
from .step import IdleSample, PartsOfRank, StepParts, from_bytes, to_bytes

_BEHIND = 2
"""Tokens behind the first target and the last picture."""


class ShortSamples(NamedTuple):
    """What is measured, and what stands in for pictures."""

    samples: list[list[list[int]]]
    """Tokens and labels of two."""
    parts: list[Parts]
    """Theirs."""
    idles: list[IdleSample]
    """One of each modality."""


def short_samples(samples: Mapping[int, Tensor], step: StepParts, config: Any) -> ShortSamples:
    """Short samples with parts, out of those of all ranks. Collective.

    Args:
        samples: int64 [2, L] of this rank, by number.
        step: the parts of all.
        config: of the model.
    """
    groups, parts = sorted({key.group for key in step.form if key.group}), step.own
    stands_for = torch.tensor(sorted(tokens_standing_for(config)))

    def order(sample: Tensor, own: Parts) -> tuple[bool, int]:
        return not any(group in own for group in groups), sample.shape[1]

    cut = sorted(((_cut(one, stands_for), parts[i]) for i, one in samples.items()), key=lambda one: order(*one))
    firsts = [next((one for one in cut if group in one[1]), None) for group in groups]
    chosen = [one for one in (*cut[:2], *firsts) if one is not None]
    of_ranks = everyone([(sample.tolist(), to_bytes(own)) for sample, own in chosen])
    every = [(torch.tensor(sample), from_bytes(own)) for of_rank in of_ranks for sample, own in of_rank]
    every.sort(key=lambda one: order(*one))
    idles = [IdleSample(group, *_without_targets(next(one for one in every if group in one[1]))) for group in groups]
    first, first_parts = every[0]
    unlike = [one for one in every if one[0].tolist() != first.tolist()]
    # A single sample stands beside another picture of its own.
    other = {key: -own if own.is_floating_point() else own for key, own in first_parts.items()}
    second, second_parts = unlike[0] if unlike else (first, other)
    is_spare = bool((second[1, 1:-1] != IGNORE).any()) and not bool(torch.isin(second[0, -1], stands_for))
    if first.shape == second.shape and is_spare:
        second = second[:, :-1]
    return ShortSamples([first.tolist(), second.tolist()], [first_parts, second_parts], idles)


def _cut(sample: Tensor, stands_for: Tensor) -> Tensor:
    """A sample [2, L] up to a little behind its first target and all its pictures."""
    last = torch.isin(sample[0], stands_for).nonzero().flatten()[-1:].tolist()
    target = (sample[1, 1:] != IGNORE).nonzero().flatten()[:1].tolist()
    return sample[:, : max([0, *last, *(place + 1 for place in target)]) + 1 + _BEHIND]


def _without_targets(one: tuple[Tensor, Parts]) -> tuple[Any, Parts]:
    sample, parts = one
    return torch.stack([sample[0], torch.full_like(sample[0], IGNORE)]).numpy(), parts


def with_parts(base: type[Measurement], parts: list[Parts], form: PartForm, *, left: bool) -> type[Measurement]:
    """What measures samples that have parts, as ``base`` measures those that have none.

    Args:
        left: rows are padded on the left.
    """

    class OfParts(base):  # type: ignore[valid-type, misc]
        def _alone(self, index: int) -> dict[str, Any]:
            pack = self._pack([self._samples[index]])
            return {**super()._alone(index), **joined([parts[index]], pack, form, rows=True, left=left)}

        def _inputs(self, pack: Pack) -> dict[str, Any]:
            own = PartsOfRank(
                self._model, form, dict(enumerate(map(_as_sample, self._samples))), dict(enumerate(parts))
            )
            return {**super()._inputs(pack), **own.inputs_of(pack, rows=self.of_rows, left=left)}

        def _may_cut(self, packed: Any) -> bool:
            return False

    return OfParts


def _as_sample(sample: list[list[int]]) -> Any:
    return torch.tensor(sample).numpy()
