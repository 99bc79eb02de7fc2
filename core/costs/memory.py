"""What a plan holds in memory, predicted, by a walk through the passes of a rank at a stage.

    forward, kept      + layers that are not recomputed, inputs of those that are, the head at the last stage
    forward, replayed  + the stage's input, after the first stage
    forward, cut       + K and V of the whole sequence with its first slice (they are stored in one piece)
    backward           - what its forward kept; with a sequence's first one + dK and dV of all tokens before the last
                       slice, with its last one - K, V, dK and dV; with a step's first one + gradients that come late
    backward, split    + inputs of linear layers and gradients of their outputs, until its weight gradients are computed

A device of two stages holds what both do (`StepPlan.merge`): in each pass of one also what the other has kept.

A backward is highest where it begins (the head's working bytes), at its first layer or at its last one: a layer that is
recomputed, and what a layer's MLP or its attention takes while it runs. Head: final norm, output layer and loss.

Where ranks share experts, a rank holds what lies at experts (`MemoryCost.expert_bytes_per_token`) of the mean tokens of
its round (`rounds`), whatever its own are: routing is taken to be even, and under ZeRO 3 all ranks to be one group.

Of a shared micro-batch a rank holds the activations of its own tokens (`tokens_of_ranks`), and K and V of the slices of
whose CP group it is a member. What waits in host memory (`StepPlan.offload`) is not held, but for one layer's share on
its way.

Left out: what one kernel takes and gives back, buffers of communication (K and V of other ranks among them, and of all
tokens in an all-gather), key heads that several ranks keep, tensors on their way between stages, and of moved tokens
that their queries, keys and values are kept by the rank that attends for them.
Coefficients: `core.plan.limits`; docs/costs.md has the measured errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..machine.cluster import Cluster
from ..machine.layout import most_share
from ..plan.limits import Limits, MemoryCost
from ..plan.order import orders_of_device, orders_of_stage
from ..plan.step_plan import Op, StepPlan
from .memory_walk import Walk, kept_share, parts_of


def activation_budget_bytes(cluster: Cluster, memory: MemoryCost, limits: Limits) -> float:
    """What activations may take on a device: the plan's own cap, or what the cluster's memory leaves.

    A tenth is left free.
    """
    if limits.max_activation_bytes < float("inf"):
        return limits.max_activation_bytes
    return 0.9 * cluster.memory_bytes - fixed_bytes(memory, limits)


def fixed_bytes(memory: MemoryCost, limits: Limits) -> float:
    """Weights and optimizer states of one rank, gradients where they are kept, weights gathered from other ranks.

    Of unequal stages the one with most layers counts.
    """
    others = 1.0 - 1.0 / limits.num_ranks
    mean_bytes = memory.fixed_bytes - memory.sharded_bytes * others + (memory.gathered_bytes if others else 0.0)
    return most_share(limits.layers) * mean_bytes


def peak_activation_bytes(plan: StepPlan, stage: int, rank: int) -> tuple[float, Op]:
    """Largest number of bytes that a plane rank holds in passes of a stage, and the pass at which it does."""
    return peaks_of_stage(plan, stage, [rank])[0]


def peaks_of_stage(plan: StepPlan, stage: int, ranks: Iterable[int] | None = None) -> list[tuple[float, Op]]:
    """`peak_activation_bytes` of several plane ranks of a stage; None: of all."""
    peaks = []
    for ops, levels in _walks(plan, stage, ranks):
        peak = max(levels, default=0.0)
        peaks.append((peak, ops[levels.index(peak)]) if peak > 0 else (0.0, Op("F", 0)))
    return peaks


def levels_of_stage(plan: StepPlan, stage: int) -> list[list[float]]:
    """The most that every plane rank of a stage holds in each pass of its order (`order.orders_of_stage`) [bytes]."""
    return [levels for _, levels in _walks(plan, stage, None)]


def _walks(plan: StepPlan, stage: int, ranks: Iterable[int] | None) -> Iterator[tuple[list[Op], list[float]]]:
    orders = orders_of_stage(plan, stage)
    for rank in range(len(orders)) if ranks is None else ranks:
        ops = orders[rank]
        if plan.merge:
            yield ops, _levels_beside_other(plan, stage, rank)
        else:
            yield ops, Walk(plan, stage).levels(ops, parts_of(plan, ops, rank))


def _levels_beside_other(plan: StepPlan, stage: int, rank: int) -> list[float]:
    """What the device of a stage holds in each pass of this one: what the pass holds, and what its other stage does."""
    device = plan.limits.device_of_stage(stage)
    walks = {own: Walk(plan, own) for own in plan.limits.stages_of_device(device)}
    (other,) = (walk for own, walk in walks.items() if own != stage)
    levels = []
    rows = {own: orders_of_stage(plan, own)[rank] for own in walks}
    levels_of = {own: walk.passes(rows[own], parts_of(plan, rows[own], rank)) for own, walk in walks.items()}
    for own, _ in orders_of_device(plan, device)[rank]:
        level = next(levels_of[own])
        if own == stage:
            levels.append(level + other.held_bytes)
    return levels


def offloaded_bytes(plan: StepPlan, stage: int, number: int, tokens: Any) -> Any:
    """What of a kept micro-batch of the forward waits in host memory, for the tokens (a number, an array) of a rank."""
    limits = plan.limits.at(stage)
    memory, layers = limits.memory, limits.layers_per_stage
    recomputed = plan.recompute[stage][number] if plan.recompute else 0
    kept = memory.activation_bytes_per_token * (layers - recomputed) / layers
    return tokens * (kept + memory.input_bytes_per_token * recomputed) * (1.0 - kept_share(plan, stage, number))
