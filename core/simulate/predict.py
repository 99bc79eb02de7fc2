"""How long a plan computes, predicted: what planners compare. `simulate` adds what moves between ranks.

A pass of every micro-batch on its ranks, stage by stage, by the rules of `events`, with nothing in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import NamedTuple

import numpy as np

from ..aliases import Floats
from ..costs.costs import Costs, is_even, rank_works
from ..costs.rounds import rounds_of
from ..machine.layout import share_of
from ..plan.order import DIRECTIONS
from ..plan.program import forwards_that_run
from ..plan.step_plan import Op, PassKind, StepPlan
from .events import play


class Prediction(NamedTuple):
    """Predicted seconds of one step."""

    step_s: float
    """When the last rank has finished."""
    busy_s: tuple[float, ...]
    """Busy seconds of each plane rank on one stage."""


Passes = tuple[list[float], list[float]]
"""Seconds of each micro-batch of the forward and of the backward."""
OfRanks = Mapping[Op, Floats]
"""Seconds of each rank of a micro-batch, in their order, by its pass."""


def predict(plan: StepPlan, costs: Costs, head_frac: float = 0.0) -> Prediction:
    """Predict a lawful plan. ``costs`` and ``head_frac`` are those of a planning context. Stages are alike here: where
    they recompute different layers, or run less of a forward, each is taken to run the mean of them."""
    together, costs = expert_seconds(plan, costs), beside_shared_experts(costs)
    forward, backward = map(list, pass_seconds(plan, costs))
    stages = plan.limits.num_stages
    for stage in range(stages) if plan.recompute else ():
        for j, share in layers_again(plan, stage).items():
            backward[j] += share * share_of(plan.limits.layers, stage) / stages * costs.layers_s(plan.micro_batches[j])
    of_ranks = rank_seconds(plan, costs)
    for i, row in kv_seconds(plan, own_costs(plan, costs), head_frac).items():
        forward[i] += (float(row.max()) - forward[i]) / stages
        if (op := Op("F", i)) in of_ranks:
            of_ranks[op] = of_ranks[op] + (row - of_ranks[op]) / stages
    for of_stage in together:
        for op, seconds_s in of_stage.items():
            (forward if op.kind == "F" else backward)[op.micro_batch] += seconds_s / stages
            if op in of_ranks:
                of_ranks[op] = of_ranks[op] + seconds_s / stages
    busy = busy_seconds(plan, (forward, backward), of_ranks)
    limits = plan.limits
    if limits.num_stages == limits.together == 1 and all(len(m.ranks) == 1 for m in plan.micro_batches):
        return Prediction(max(busy), tuple(busy))  # nobody waits for anybody
    # A backward and its weight gradients are one pass here, whenever the latter run.
    seconds = {"F": forward, "B": backward, "W": [0.0] * len(backward)}
    events = play(plan, lambda stage, op: seconds[op.kind][op.micro_batch])
    step_s = max(event.free_s for event in events)
    return Prediction(step_s, tuple(busy))


def pass_seconds(plan: StepPlan, costs: Costs) -> Passes:
    """Seconds of each micro-batch of the forward and of the backward on its busiest ranks, replays included.

    What a plan recomputes by stage (`StepPlan.recompute`) is left out: `layers_again` says what that is. Every forward
    counts in full: `kv_seconds` says what the last stage really runs of those that are replayed.
    """
    costs = own_costs(plan, costs)
    forward, backward = costs.micro_batches_s(plan.micro_batches)
    again, backward = costs.micro_batches_s(plan.backward) if plan.backward else (forward, backward)
    for j in () if costs.recompute else plan.replayed:
        backward[j] += again[j]
    return forward, backward


def kv_seconds(plan: StepPlan, costs: Costs, head_frac: float) -> dict[int, Floats]:
    """What each forward whose activations nobody keeps takes at the last stage: float64 [ranks] in their order.

    There is no head in it, and only the slices that a replay reads (`program.forwards_that_run`).
    """
    if len(plan.kept) == len(plan.micro_batches):
        return {}
    result: dict[int, Floats] = {}
    for i, runs in enumerate(forwards_that_run(plan, True)):
        if runs is None:
            result[i] = np.zeros(len(plan.micro_batches[i].ranks))
        elif i not in plan.kept:
            works = rank_works(runs).values()
            result[i] = np.array([costs.forward.launch_s + costs.layers_of(work, head_frac) for work in works])
    return result


def beside_shared_experts(costs: Costs) -> Costs:
    """Costs without what the ranks of a group have at the experts that they share: `expert_seconds` says that."""
    return costs.at_experts(0.0) if costs.ep > 1 else costs


def expert_seconds(plan: StepPlan, costs: Costs) -> list[dict[Op, float]]:
    """What the busiest rank of a group has at shared experts in each pass of each stage, replays included.

    Nothing where no experts are shared; else of every forward and backward.
    """
    costs, replayed = own_costs(plan, costs), frozenset(plan.replayed)
    if costs.ep == 1 or not costs.both.expert_s:
        return [{} for _ in range(plan.limits.num_stages)]
    result = []
    for stage in range(plan.limits.num_stages):
        again, own = layers_again(plan, stage), share_of(plan.limits.layers, stage)
        seconds = {}
        for op, brought in rounds_of(plan, stage, costs.ep).items():
            token_s = costs.forward.expert_s
            if op.kind == "B":
                forwards = (op.micro_batch in replayed and not costs.recompute) + again.get(op.micro_batch, 0.0)
                token_s = costs.backward.expert_s + token_s * forwards
            seconds[op] = own * token_s * costs.expert_imbalance * brought.mean
        result.append(seconds)
    return result


def own_costs(plan: StepPlan, costs: Costs) -> Costs:
    """Costs without the recipe's recomputation where a plan says itself what is recomputed."""
    return costs.kept() if plan.recompute and costs.recompute else costs


def layers_again(plan: StepPlan, stage: int) -> dict[int, float]:
    """The backwards that recompute layers at a stage because the plan says so, and the share of its layers."""
    layers = plan.limits.at(stage).layers_per_stage
    return {j: count / layers for j, count in enumerate(plan.recompute[stage]) if count} if plan.recompute else {}


def rank_seconds(plan: StepPlan, costs: Costs) -> dict[Op, Floats]:
    """Seconds of each rank of the micro-batches that give their ranks unlike work, replays included."""
    result: dict[Op, Floats] = {}
    costs = own_costs(plan, costs)
    again = () if costs.recompute else frozenset(plan.replayed)
    for kind in DIRECTIONS if plan.shared else ():
        for number, m in enumerate(plan.passes(kind)):
            if not is_even(m):
                forward, backward = costs.rank_s(m)
                result[Op(kind, number)] = forward if kind == "F" else backward + forward * (number in again)
    return result


def busy_seconds(plan: StepPlan, passes: Passes, of_ranks: OfRanks) -> list[float]:
    """What every rank of the plane computes; ``of_ranks`` where its micro-batch leaves it less than the busiest."""
    busy = [0.0] * plan.limits.num_ranks
    for kind, seconds in zip(DIRECTIONS, passes, strict=True):
        for number, (m, each) in enumerate(zip(plan.passes(kind), seconds, strict=True)):
            own = of_ranks.get(Op(kind, number)) if of_ranks else None
            for rank, rank_s in zip(m.ranks, repeat(each) if own is None else own.tolist(), strict=False):
                busy[rank] += rank_s
    return busy


def micro_batch_imbalance(plan: StepPlan, costs: Costs) -> tuple[float, float]:
    """Costliest micro-batch over mean, forward and backward (replays included, dummies and launches left out)."""

    def over_mean(seconds: list[float], kind: PassKind, launch_s: float) -> float:
        busy = [s - launch_s for s, m in zip(seconds, plan.passes(kind), strict=True) if m.slices]
        return max(busy) * len(busy) / sum(busy) if sum(busy) else 1.0

    forward, backward = pass_seconds(plan, costs)
    return over_mean(forward, "F", costs.forward.launch_s), over_mean(backward, "B", costs.backward.launch_s)
