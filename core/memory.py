"""What a plan holds in memory, predicted: activations, inputs of replayed micro-batches, prefix KV and its gradients.

    kept micro-batch      slots * activation bytes * layers that are not recomputed, from its forward to its backward;
                          where layers are recomputed, one of them at a time during the backward
    replayed micro-batch  the stage's input from forward to backward; its activations while its own backward runs
    cut sequence          K and V of the whole sequence from its first forward to its last backward (they are stored in
                          one piece), dK and dV from its first backward on

Left out: weights, gradients and optimizer states, buffers of communication, and what one kernel needs while it runs.
"""

from __future__ import annotations

from .cluster import Cluster
from .costs import MemoryCost
from .order import orders_of_stage
from .workload import Limits, Op, StepPlan


def room_bytes(cluster: Cluster, memory: MemoryCost, limits: Limits) -> float:
    """What activations may take on a device: the plan's own cap, or what the cluster's memory leaves, roughly.

    A tenth is left free.
    """
    if limits.max_activation_bytes < float("inf"):
        return limits.max_activation_bytes
    return 0.9 * cluster.memory_bytes - fixed_bytes(memory, limits)


def fixed_bytes(memory: MemoryCost, limits: Limits) -> float:
    """Weights, gradients and optimizer states of one rank, roughly.

    Of 16 bytes a weight (mixed precision with Adam; Rajbhandari et al., arXiv 1910.02054, section 3.1) ten are taken to
    be sharded over the ranks.
    """
    return memory.fixed_bytes * (6 + 10 / limits.num_ranks) / 16


def peak_activation_bytes(plan: StepPlan, stage: int, rank: int) -> tuple[float, Op]:
    """Largest number of bytes that a plane rank of a stage holds, and the pass at which it does."""
    return _peak(plan, stage, orders_of_stage(plan, stage)[rank])


def peaks_of_stage(plan: StepPlan, stage: int) -> list[tuple[float, Op]]:
    """The same for every plane rank."""
    return [_peak(plan, stage, ops) for ops in orders_of_stage(plan, stage)]


def _peak(plan: StepPlan, stage: int, ops: list[Op]) -> tuple[float, Op]:
    limits = plan.limits
    layers = limits.layers_per_stage
    lengths, all_cut = plan.sequences, plan.cut
    tokens_left: dict[int, int] = {}
    held, peak, where = 0.0, 0.0, Op("F", 0)
    for op in ops:
        micro_batch = plan.passes(op.kind)[op.micro_batch]
        share = 1.0 / len(micro_batch.ranks)
        recomputed = plan.recompute[stage][op.micro_batch] if plan.recompute else 0
        activations = share * micro_batch.num_slots * limits.activation_bytes_per_token * (layers - recomputed)
        inputs = share * micro_batch.num_slots * limits.input_bytes_per_token if stage else 0.0
        cut = [s for s in micro_batch.slices if s.sequence in all_cut] if all_cut else []
        if op.kind == "F":
            for s in cut:
                if s.sequence not in tokens_left:
                    tokens_left[s.sequence] = lengths[s.sequence].length
                    held += share * lengths[s.sequence].length * limits.kv_bytes_per_token * layers
            held += activations if op.micro_batch in plan.kept else inputs
            now = held
        else:
            replayed = plan.forward_of[op.micro_batch] is None
            for s in cut:
                if tokens_left[s.sequence] == lengths[s.sequence].length:
                    held += share * lengths[s.sequence].length * limits.kv_grad_bytes_per_token * layers
            slots = share * micro_batch.num_slots
            layer = slots * (limits.replay_bytes_per_token or (recomputed and limits.activation_bytes_per_token))
            alive = slots * limits.replay_bytes_per_token * layers or activations
            now = held + (alive if replayed else layer)
            held -= inputs if replayed else activations
            for s in cut:
                tokens_left[s.sequence] -= s.length
                if not tokens_left[s.sequence]:
                    per_token = limits.kv_bytes_per_token + limits.kv_grad_bytes_per_token
                    held -= share * lengths[s.sequence].length * per_token * layers
        if now > peak:
            peak, where = now, op
    return peak, where
