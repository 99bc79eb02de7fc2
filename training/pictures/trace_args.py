"""What the events of a trace tell when they are asked: the ``args`` of a pass, the bubbles of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ...core.input.format import to_json
from ...core.plan.step_plan import StepPlan
from ...core.simulate.step import Span
from ..bubbles import bubbles_of, name_of
from ..pipelines import recomputed

_MOST_TOLD = 64
"""Ranks of all stages whose bubbles a step's event lists."""

_MOST_CHUNKS = 8
"""Chunks that the event of a pass lists."""


def args_of(plan: StepPlan) -> Callable[[str, int, int], str]:
    """Gives the ``args`` of the events of a micro-batch in a direction at a stage as JSON, each made once."""
    lengths = plan.lengths.tolist()

    @cache
    def args_of_pass(kind: str, number: int, stage: int) -> str:
        micro_batch = plan.passes("B" if kind == "B" else "F")[number]
        args: dict[str, Any] = {
            "micro-batch": number,
            "tokens": micro_batch.num_tokens,
            "slices": len(micro_batch.slices),
            "longest slice": max((s.length for s in micro_batch.slices), default=0),
        }
        if len(micro_batch.ranks) > 1:
            args["on ranks"] = len(micro_batch.ranks)
        if micro_batch.num_padded_tokens > micro_batch.num_tokens:
            args["padding"] = round(1 - micro_batch.num_tokens / micro_batch.num_padded_tokens, 4)
        chunks = [s for s in micro_batch.slices if s.length < lengths[s.sequence]]
        if chunks:
            shown = [f"{s.start} to {s.stop} of sequence {s.sequence}" for s in chunks[:_MOST_CHUNKS]]
            args["chunks"] = "; ".join(shown + ["..."] * (len(chunks) > _MOST_CHUNKS))
        if plan.recompute:
            args["layers recomputed"] = recomputed(plan, stage, number)
        return f',"args":{to_json(args, compact=True)}'

    return args_of_pass


def tell_bubbles(plan: StepPlan, spans: Sequence[Span]) -> dict[str, float]:
    """Bubbles of the step, then of its ranks, where they are not too many to read."""
    bubbles = bubbles_of([spans])
    args = {"bubble": round(bubbles.frac, 4)}
    if len(bubbles.waits) <= _MOST_TOLD:
        for place in sorted(bubbles.waits):
            args[f"bubble of {name_of(place, plan.limits.num_stages)}"] = round(bubbles.of(*place), 4)
    return args
