"""Blocks of rounds as a plan: the order of passes, the time it is worth trying for, and replays that make it fit."""

from __future__ import annotations

from typing import NamedTuple

from ....core.costs.costs import PassCost
from ....core.costs.memory import peaks_of_stage
from ....core.plan.limits import Limits
from ....core.plan.order import in_slots
from ....core.plan.step_plan import MicroBatch, Op, StepPlan


class Block(NamedTuple):
    """Rounds that run forward in order, then backward in reverse."""

    rounds: list[list[MicroBatch]]


def compute_seconds(blocks: list[Block], price: PassCost, stages: int) -> float:
    """Seconds of the step's compute, if ranks met after every round."""
    rounds = [
        max(sum(price.seconds(s.length, s.start) for s in m.slices) / len(m.ranks) for m in one)
        for block in blocks
        for one in block.rounds
    ]
    return float(sum(rounds) + (stages - 1) * max(rounds) + (len(rounds) + stages - 1) * price.launch_s)


def in_blocks(incoming: StepPlan, limits: Limits, blocks: list[Block], name: str) -> StepPlan:
    """The plan of these blocks: rounds in slots of 1F1B, where a slot of a block's backward needs all its forwards."""
    rounds = [one for block in blocks for one in block.rounds]
    numbers: list[list[int]] = []
    micro_batches: list[MicroBatch] = []
    for one in rounds:
        numbers.append(list(range(len(micro_batches), len(micro_batches) + len(one))))
        micro_batches += one
    backward: list[int] = []
    need: list[int] = []
    done = 0
    for block in blocks:
        backward += range(done + len(block.rounds) - 1, done - 1, -1)
        done += len(block.rounds)
        need += [done] * len(block.rounds)
    order = tuple(
        tuple(
            Op(op.kind, number)
            for op in in_slots(range(len(rounds)), backward, need, limits.num_stages - 1 - stage)
            for number in numbers[op.micro_batch]
        )
        for stage in range(limits.num_stages)
    )
    return incoming.with_micro_batches(micro_batches, limits, name, order)


def fitted(plan: StepPlan, budget_bytes: float) -> StepPlan:
    """With as few replays as bring the plan into the device: of every chain the last slices keep their activations.

    As it was where none do.
    """
    chains: dict[int, list[int]] = {}
    for number, m in enumerate(plan.micro_batches):
        for s in m.slices:
            if s.sequence in plan.cut:
                chains.setdefault(s.sequence, []).append(number)

    def keeping(count: int) -> StepPlan:
        early = tuple(sorted(i for chain in chains.values() for i in chain[: max(0, len(chain) - count)]))
        return plan.revised(replayed=early)

    def fits(tried: StepPlan) -> bool:
        stages = range(plan.limits.num_stages)
        return max(peak for stage in stages for peak, _ in peaks_of_stage(tried, stage)) <= budget_bytes

    most = max(map(len, chains.values()), default=1)
    if fits(tried := keeping(most)):
        return tried
    if not fits(keeping(1)):
        return plan
    low, high = 1, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(keeping(middle)) else (low, middle - 1)
    return keeping(low)
