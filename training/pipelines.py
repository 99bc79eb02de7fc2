"""What a plan does beyond giving ranks their tokens: chunks, layers that run again, weight gradients of their own.

Everything is predicted or counted from the plan; `plan` prints it stage by stage.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ..core.costs.memory import peaks_of_stage
from ..core.plan.order import orders_of_stage
from ..core.plan.step_plan import Op, StepPlan
from ..core.simulate.step import Simulation

Row = dict[str, Any]


def recomputed(plan: StepPlan, stage: int, number: int) -> int:
    """Layers of a stage that the backward of a micro-batch runs again because the plan says so."""
    return plan.recompute[stage][number] if plan.recompute and number >= 0 else 0


def describe(plan: StepPlan, outcome: Simulation) -> Row | None:
    """The pipeline of one step as ``plan --json`` tells it; None for a plan of one stage that recomputes nothing.

    ``chunks`` are the slices of sequences that are cut, ``most_chunks`` those of the sequence with the most. By stage:
    ``recomputed_layers`` of ``layers`` (of a stage, times micro-batches), ``weight_passes`` (backwards whose weight
    gradients are a pass of their own), ``in_flight`` (the most micro-batches between forward and backward on a rank),
    ``bubble_frac``, ``peak_activation_bytes`` (the most of a rank: what a cap counts and `bench` measures) and
    ``peak_bytes`` (with weights and optimizer).
    """
    limits = plan.limits
    if limits.num_stages == 1 and not plan.recompute:
        return None
    chunks = Counter(s.sequence for m in plan.micro_batches for s in m.slices if s.sequence in plan.cut)
    return {
        "micro_batches": len(plan.micro_batches),
        "cut_sequences": len(chunks),
        "chunks": chunks.total(),
        "most_chunks": max(chunks.values(), default=1),
        "stages": [_stage(plan, outcome, stage) for stage in range(limits.num_stages)],
    }


def _stage(plan: StepPlan, outcome: Simulation, stage: int) -> Row:
    working_s = float(np.mean(outcome.busy_s[stage] + outcome.exposed_s[stage])) + outcome.update_s
    return {
        "stage": stage,
        "recomputed_layers": sum(plan.recompute[stage]) if plan.recompute else 0,
        "layers": plan.limits.layers_per_stage * len(plan.micro_batches),
        "weight_passes": len(plan.split[stage]) if plan.split else 0,
        "in_flight": max((_in_flight(ops) for ops in orders_of_stage(plan, stage)), default=0),
        "bubble_frac": max(0.0, 1.0 - working_s / outcome.step_s) if outcome.step_s else 0.0,
        "peak_activation_bytes": max(peak for peak, _ in peaks_of_stage(plan, stage)),
        "peak_bytes": float(outcome.peak_bytes[stage].max()),
    }


def _in_flight(ops: list[Op]) -> int:
    return int(np.cumsum([{"F": 1, "B": -1, "W": 0}[op.kind] for op in ops]).max(initial=0))
