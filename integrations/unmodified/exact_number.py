"""A plan for a loop that runs the same number of micro-batches on every rank, whatever a plan would need.

A planner packs a rank's samples into as few micro-batches as its cap allows; DeepSpeed's loop runs
``gradient_accumulation_steps`` of them on every rank in any case. A dummy in the rest costs a launch and a token, and
scripts print its loss. So the costliest micro-batch is cut in two, between samples, until there are enough, as far as
there are samples. What a rank computes is the same; where ranks wait for each other in every pass (ZeRO 3, experts),
the plan's own costs decide whether the micro-batches side by side are slower for it, and then the dummies stay.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.costs.costs import Costs
from ...core.errors import refuse_first
from ...core.plan.step_plan import MicroBatch, Slice, StepPlan

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
