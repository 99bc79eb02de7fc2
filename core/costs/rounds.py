"""Tokens that ranks which share experts bring to them together.

The k-th passes of a direction of all ranks of a group are a round: in each of its layers that has experts their tokens
go out together, and all wait for the busiest experts before the tokens come back.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

from ..plan.order import DIRECTIONS, orders_of_stage
from ..plan.program import forwards_that_run
from ..plan.step_plan import MicroBatch, Op, StepPlan, fact_of_plan
from ..plan.token_layout import tokens_of_ranks
from .costs import is_even


class Brought(NamedTuple):
    """Tokens that the ranks of a round bring, padding included."""

    mean: float
    """Of a rank: so many does each have at its experts if routing is even."""
    most: float
    """Of any rank."""


@fact_of_plan("lengths", "micro_batches", "backward", "replayed", "order", "limits")
def rounds_of(plan: StepPlan, stage: int, size: int) -> dict[Op, Brought]:
    """What the round of each forward and backward of a stage brings, in groups of ``size`` neighbouring ranks.

    A pass on ranks of several groups has the largest numbers of its rounds.
    """
    rows = orders_of_stage(plan, stage)
    runs = {"F": forwards_that_run(plan, stage == plan.limits.num_stages - 1), "B": plan.passes("B")}
    rounds: dict[Op, Brought] = {}
    for kind in DIRECTIONS:
        tokens = [_tokens_of_ranks(m) for m in runs[kind]]
        passes = [[op for op in row if op.kind == kind] for row in rows]
        for first in range(0, len(rows), size):
            for round_ in zip_longest(*passes[first : first + size]):
                # Only plans that are not yet in rounds lack a pass.
                counts = [tokens[op.micro_batch].get(first + k, 0.0) for k, op in enumerate(round_) if op]
                brought = Brought(sum(counts) / size, max(counts))
                for op in filter(None, round_):
                    known = rounds.get(op, brought)
                    rounds[op] = Brought(*map(max, known, brought))
    return rounds


def _tokens_of_ranks(micro_batch: MicroBatch | None) -> dict[int, float]:
    if micro_batch is None:
        return {}
    if is_even(micro_batch):
        return dict.fromkeys(micro_batch.ranks, micro_batch.num_padded_tokens / len(micro_batch.ranks))
    return {rank: float(tokens) for rank, tokens in tokens_of_ranks(micro_batch).items()}
