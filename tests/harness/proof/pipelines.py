"""Random lawful schedules for pipelines: orders of forwards and backwards, interleavings, W passes and recomputation.

Only the laws are asked of them; no planner would make most of these. Drawn from a `random.Random`, so from a seed or
from hypothesis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths

SHARES = {"none": 0.0, "some": 0.5, "all": 1.0}
Edges = dict[int, set[int]]
"""For each micro-batch those that must come before it."""


def random_pipeline(
    draw: Random,
    lengths: Any,
    *,
    num_ranks: int,
    num_stages: int,
    layers_per_stage: int,
    pieces: Iterable[int] = (1, 1, 2, 5, 16),
    recompute: str = "",
    split: str = "",
    replay: str = "none",
    v_shape: bool = False,
    layers: tuple[int, ...] = (),
) -> StepPlan:
    """A checked plan.

    Args:
        pieces: a sequence is cut into one of these numbers of slices, or one per token where it has fewer.
        recompute: of the layers "none", "some" (any number for each stage and micro-batch) or "all"; "": drawn.
        split: of the backwards of each stage "none", "some" or "all" leave their weight gradients to a W; "": drawn.
        replay: of the micro-batches "none", "some" or "all" keep nothing but prefix KV; "": drawn.
        v_shape: each device has two of the stages, whose passes it takes by lot.
        layers: of each stage, where they are unequal; ``layers_per_stage`` are the most.
    """
    recompute, split, replay = (word or draw.choice(list(SHARES)) for word in (recompute, split, replay))
    micro_batches = _packs(draw, lengths, num_ranks, list(pieces))
    before: Edges = {i: set() for i in range(len(micro_batches))}
    for chain in _chains(micro_batches):
        for earlier, later in pairwise(chain):
            before[later].add(earlier)
    after: Edges = {i: {j for j in before if i in before[j]} for i in before}
    forward, backward = _linear_extension(draw, before), _linear_extension(draw, after)
    orders = _interleaved(draw, forward, backward, _needs(micro_batches), num_stages)
    of_stages = layers or (layers_per_stage,) * num_stages
    least, most = {"none": (0, 0), "some": (0, 1), "all": (1, 1)}[recompute]
    limits = Limits(num_ranks, 1 << 20, num_stages, layers_per_stage, layers=layers, splits_backward=True)
    plan = StepPlan(
        as_lengths(lengths),
        tuple(micro_batches),
        limits,
        order=tuple(tuple(_with_weights(draw, ops, SHARES[split])) for ops in orders),
        recompute=tuple(tuple(draw.randint(least * n, most * n) for _ in micro_batches) for n in of_stages),
        replayed=tuple(i for i in before if draw.random() < SHARES[replay]),
        made_by=f"recompute {recompute}, split {split}, replay {replay}",
    )
    return check(in_v(draw, plan) if v_shape else plan)


def in_v(draw: Random, plan: StepPlan) -> StepPlan:
    """The plan on half as many devices, each of which runs what is ready of its two stages, by lot."""
    limits = replace(plan.limits, v_shape=True)
    last, at = limits.num_stages - 1, [0] * limits.num_stages
    done: set[tuple[int, Op]] = set()
    merge: list[list[int]] = [[] for _ in range(limits.num_devices)]
    while ready := [
        stage
        for stage, ops in enumerate(plan.order)
        if at[stage] < len(ops)
        for op in ops[at[stage] : at[stage] + 1]
        if op.kind == "W"
        or (op.kind == "F" and (stage == 0 or (stage - 1, op) in done))
        or (op.kind == "B" and (stage == last or (stage + 1, op) in done))
    ]:
        stage = draw.choice(ready)
        done.add((stage, plan.order[stage][at[stage]]))
        at[stage] += 1
        merge[limits.device_of_stage(stage)].append(stage)
    return replace(plan, limits=limits, merge=tuple(map(tuple, merge)))


def _packs(draw: Random, lengths: Any, num_ranks: int, pieces: list[int]) -> list[MicroBatch]:
    """Groups of the first slices left of one to four sequences of a rank, until none is left."""
    rank_of = [draw.randrange(num_ranks) for _ in lengths]
    left = {i: _cut(draw, i, n, draw.choice(pieces)) for i, n in enumerate(lengths)}
    packs = []
    while any(left.values()):
        rank = draw.choice(sorted({rank_of[i] for i, chain in left.items() if chain}))
        heads = [i for i, chain in left.items() if chain and rank_of[i] == rank]
        chosen = draw.sample(heads, draw.randint(1, min(4, len(heads))))
        packs.append(MicroBatch(tuple(left[i].pop(0) for i in chosen), (rank,)))
    return packs


def _cut(draw: Random, index: int, length: int, count: int) -> list[Slice]:
    cuts = sorted(draw.sample(range(1, length), min(length, count) - 1))
    return [Slice(index, a, b) for a, b in pairwise([0, *cuts, length])]


def _chains(micro_batches: list[MicroBatch]) -> list[list[int]]:
    """The micro-batches of each sequence, in launch order."""
    found: dict[int, list[int]] = {}
    for number, micro_batch in enumerate(micro_batches):
        for s in micro_batch.slices:
            found.setdefault(s.sequence, []).append(number)
    return list(found.values())


def _needs(micro_batches: list[MicroBatch]) -> Edges:
    """For each backward the forwards that a stage must have run: its own and all of its sequences."""
    needs: Edges = {i: {i} for i in range(len(micro_batches))}
    for chain in _chains(micro_batches):
        for number in chain:
            needs[number].update(chain)
    return needs


def _linear_extension(draw: Random, before: Edges) -> list[int]:
    order: list[int] = []
    while len(order) < len(before):
        order.append(draw.choice([i for i in before if i not in order and before[i] <= set(order)]))
    return order


def _interleaved(draw: Random, forward: list[int], backward: list[int], needs: Edges, stages: int) -> list[list[Op]]:
    """For each stage its passes: stages run what is ready, by lot, each with a liking of its own for backwards."""
    orders: list[list[Op]] = [[] for _ in range(stages)]
    eager = [draw.random() for _ in orders]

    def next_ready(stage: int) -> list[Op]:
        """Of the next forward and the next backward those that have all they wait for."""
        ran = set(orders[stage])
        next_f = next((Op("F", i) for i in forward if Op("F", i) not in ran), None)
        next_b = next((Op("B", i) for i in backward if Op("B", i) not in ran), None)
        found = [next_f] if next_f and (stage == 0 or next_f in orders[stage - 1]) else []
        if next_b and {Op("F", i) for i in needs[next_b.micro_batch]} <= ran:
            found += [next_b] if stage == stages - 1 or next_b in orders[stage + 1] else []
        return found

    while ready := [stage for stage in range(stages) if next_ready(stage)]:
        stage = draw.choice(ready)
        found = next_ready(stage)
        orders[stage].append(found[-1] if draw.random() < eager[stage] else found[0])
    return orders


def _with_weights(draw: Random, ops: list[Op], share: float) -> list[Op]:
    """Some backwards leave their weight gradients to a W: right behind them, or anywhere up to the end."""
    found = list(ops)
    for op in ops:
        if op.kind == "B" and draw.random() < share:
            place = found.index(op) + 1
            found.insert(place if draw.random() < 0.3 else draw.randint(place, len(found)), Op("W", op.micro_batch))
    return found
