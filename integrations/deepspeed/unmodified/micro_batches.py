"""The micro-batches that a script's loop gets of a plan: as many as it runs, each as a batch of its own form.

A planner packs a rank's samples into as few micro-batches as its cap allows; DeepSpeed's loop runs
``gradient_accumulation_steps`` of them on every rank in any case. A dummy in the rest costs a launch and a token, and
scripts print its loss. So the costliest micro-batch is cut in two, between samples, until there are enough, as far as
there are samples. What a rank computes is the same; where ranks wait for each other in every pass (ZeRO 3, experts),
the plan's own costs decide whether the micro-batches side by side are slower for it, and then the dummies stay.

A batch has the keys of the script's own collate function, and one row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....core.costs.costs import Costs
from ....core.errors import refuse_first
from ....core.plan.step_plan import MicroBatch, Slice, StepPlan
from ....runtime.attention.pack import IGNORE, Pack, build_pack
from ...huggingface.samples import Sample

Row = list[MicroBatch]
"""The micro-batches of a rank, first to last."""


def into_exactly(plan: StepPlan, count: int, costs: Costs) -> list[Row]:
    """`count` micro-batches for every rank, without padding and dummies last: ``result[rank][k]``.

    Raises EvenloadError where a rank has more, or shares one with others, or layers are to be recomputed.
    """
    ranks = range(plan.limits.num_ranks)
    own = [[m._replace(pad_to=0) for i in plan.of_rank(r) if (m := plan.micro_batches[i]).slices] for r in ranks]
    _refuse_other_loops(plan, max(map(len, own)), count)

    def seconds(micro_batch: MicroBatch) -> float:
        return sum(costs.micro_batch_s(micro_batch))

    def with_dummies(rows: list[Row]) -> list[Row]:
        return [row + [MicroBatch((), (rank,))] * (count - len(row)) for rank, row in enumerate(rows)]

    dummies, real = with_dummies(own), with_dummies([_cut(row, count, seconds) for row in own])
    together = plan.limits.together > 1
    # The same seconds are summed in another order.
    slower = _step_s(real, seconds, together) > _step_s(dummies, seconds, together) * (1 + 1e-12)
    return dummies if slower else real


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
        keys: of the script's own batches; those beside tokens and labels are written where they are known.
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


def _cut(row: Row, count: int, seconds: Callable[[MicroBatch], float]) -> Row:
    """The samples of a row in `count` micro-batches, or in one each where there are fewer samples; costliest first."""
    result = list(row)
    while len(result) < count and (several := [m for m in result if len(m.slices) > 1]):
        largest = max(several, key=seconds)
        result.remove(largest)
        result += _halves(largest, seconds)
    return sorted(result, key=seconds, reverse=True)


def _halves(micro_batch: MicroBatch, seconds: Callable[[MicroBatch], float]) -> tuple[MicroBatch, MicroBatch]:
    """Its samples in two micro-batches that cost about the same: each sample, longest first, to the cheaper half."""
    halves: tuple[list[Slice], list[Slice]] = ([], [])
    sums = [0.0, 0.0]
    for piece in sorted(micro_batch.slices, key=lambda piece: -piece.length):
        cheaper = int(sums[1] < sums[0])
        halves[cheaper].append(piece)
        sums[cheaper] += seconds(micro_batch._replace(slices=(piece,)))
    first, second = (micro_batch._replace(slices=tuple(sorted(half))) for half in halves)
    return first, second


def _step_s(rows: list[Row], seconds: Callable[[MicroBatch], float], together: bool) -> float:
    """Predicted seconds of the passes of a step; `together`: ranks wait for each other after every micro-batch."""
    each = [[seconds(m) for m in row] for row in rows]
    return sum(map(max, zip(*each, strict=True))) if together else max(map(sum, each))


def _refuse_other_loops(plan: StepPlan, most: int, count: int) -> None:
    author = plan.made_by or "hand"
    refuse_first(
        (
            any(layers for row in plan.recompute for layers in row),
            "a training loop of your own decides itself what is recomputed",
            f"a plan made by {author} that says it by micro-batch",
            "set plugins.pipeline.recompute=off, or use `evenload train`",
        ),
        (
            bool(plan.shared),
            "a training loop of your own runs every micro-batch on one rank",
            f"a plan made by {author} that shares micro-batches",
            "plan under limits.whole_sequences, or use `evenload train`",
        ),
        (
            most > count,
            "the batch does not fit into the micro-batches of a step",
            f"{plan.num_tokens} tokens on {plan.limits.num_ranks} ranks need {most} micro-batches of "
            f"{plan.limits.max_tokens} tokens, gradient_accumulation_steps is {count}",
            f"raise gradient_accumulation_steps to {most}, or packing.max_tokens",
        ),
    )
