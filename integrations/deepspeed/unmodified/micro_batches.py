"""The batches that a script's loop gets of a plan: one for each micro-batch, with the keys of the script's own collate
function, and one row."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....core.plan.step_plan import MicroBatch, Slice, StepPlan
from ....runtime.attention.pack import IGNORE, Pack, build_pack
from ...huggingface.samples import Sample


@dataclass(frozen=True, eq=False)
class PlannedMicroBatch:
    """A micro-batch that the loader has handed out."""

    pack: Pack
    weight: float
    """Target tokens of this micro-batch / those of the global batch; 0 for a dummy, and for nothing else."""
    place: int
    """Of the micro-batch in its step, 0 .. gradient_accumulation_steps - 1."""
    plan: StepPlan
    """Of its step."""


def build_batch(
    plan: StepPlan,
    micro_batch: MicroBatch,
    sample: Callable[[int], Sample],
    num_targets: int,
    place: int,
    keys: Collection[str],
) -> tuple[dict[str, Tensor], PlannedMicroBatch]:
    """The batch that the script gets, and what its forward and backward need to know of it.

    Args:
        micro_batch: of this rank in the step.
        sample: by its number in the plan; every one has a target.
        num_targets: of the global batch.
        keys: of the script's own batches; those besides tokens and labels are written where they are known.
    """
    if micro_batch.slices:
        pack = build_pack(micro_batch, lambda i: sample(i).tokens.numpy())
        labels_T = torch.cat([sample(s.sequence).labels for s in micro_batch.slices]).clone()
        # The first token of a sequence would be the label of the sequence before it.
        labels_T[list(pack.segments[:-1])] = IGNORE
        own_targets = int((labels_T != IGNORE).sum())
    else:
        # Two tokens and one label: a loss that is a mean stays finite, its weight is 0.
        two = MicroBatch((Slice(0, 0, 2),), micro_batch.ranks)
        pack, own_targets = build_pack(two, lambda _: np.zeros(2, dtype=np.int64)), 0
        labels_T = torch.tensor([IGNORE, 0])
    tokens_1T = pack.tokens_T[None]
    further = {
        "attention_mask": torch.ones_like(tokens_1T),
        "position_ids": pack.positions_T[None],
        "token_type_ids": torch.zeros_like(tokens_1T),
    }
    batch = {"input_ids": tokens_1T, "labels": labels_T[None]}
    batch |= {key: value for key, value in further.items() if key in keys}
    return batch, PlannedMicroBatch(pack, own_targets / num_targets, place, plan)
