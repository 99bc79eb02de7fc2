"""The two short samples with pictures by which packs and padded groups are measured (`probe_samples`).

They have pictures where there are two that have: the ones that are shortest up to a target after the last token of a
picture. So what a picture gives to another sample shows in that sample's logits and in its loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....runtime.attention.pack import IGNORE
from ....runtime.world.agreement import everyone
from .parts import Parts, ReadParts, tokens_standing_for
from .step import FillerSample, StepParts

_BEHIND = 2
"""Tokens after the first target and the last picture."""


def short_samples(
    samples: Mapping[int, Tensor], step: StepParts, config: Any
) -> tuple[list[Tensor], ReadParts, list[FillerSample]]:
    """Two short samples, int64 [2, L] each, their parts, and one without targets of each modality, out of those of all
    ranks. Collective.

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
    every = [one for of_rank in everyone(chosen) for one in of_rank]
    every.sort(key=lambda one: order(*one))
    fillers = [
        FillerSample(group, *_without_targets(next(one for one in every if group in one[1]))) for group in groups
    ]
    first, first_parts = every[0]
    unlike = [one for one in every if not torch.equal(one[0], first)]
    # A single sample stands next to a second picture of its own.
    other = {key: -own if own.is_floating_point() else own for key, own in first_parts.items()}
    second, second_parts = unlike[0] if unlike else (first, other)
    is_spare = bool((second[1, 1:-1] != IGNORE).any()) and not bool(torch.isin(second[0, -1], stands_for))
    if first.shape == second.shape and is_spare:
        second = second[:, :-1]
    return [first, second], ReadParts(step.form, [first_parts, second_parts]), fillers


def _cut(sample: Tensor, stands_for: Tensor) -> Tensor:
    """A sample [2, L] up to a little after its first target and all its pictures."""
    last = torch.isin(sample[0], stands_for).nonzero().flatten()[-1:].tolist()
    target = (sample[1, 1:] != IGNORE).nonzero().flatten()[:1].tolist()
    return sample[:, : max([0, *last, *(place + 1 for place in target)]) + 1 + _BEHIND].clone()


def _without_targets(one: tuple[Tensor, Parts]) -> tuple[Any, Parts]:
    sample, parts = one
    return torch.stack([sample[0], torch.full_like(sample[0], IGNORE)]).numpy(), parts
