"""What a plan holds in memory, predicted, by a walk through the passes of a rank at a stage.

    forward, kept      + layers that are not recomputed, inputs of those that are, the head at the last stage
    forward, replayed  + the stage's input, behind the first stage
    forward, cut       + K and V of the whole sequence with its first slice (they are stored in one piece)
    backward           - what its forward kept; with a sequence's first one + dK and dV of all tokens before the last
                       slice, with its last one - K, V, dK and dV; with a step's first one + gradients that come late

A backward is highest where it begins (the head's working bytes), at its first layer or at its last one: a layer that is
recomputed, and what a layer's MLP or its attention takes while it runs. Head: final norm, output layer and loss.

Left out: what one kernel takes and gives back, buffers of communication, tensors on their way between stages.
Coefficients: `costs.MemoryCost`; docs/costs.md has the measured errors.
"""

from __future__ import annotations

from collections.abc import Iterable

from .cluster import Cluster
from .costs import MemoryCost
from .order import orders_of_stage
from .workload import Beside, Limits, Op, StepPlan


def room_bytes(cluster: Cluster, memory: MemoryCost, limits: Limits) -> float:
    """What activations may take on a device: the plan's own cap, or what the cluster's memory leaves.

    A tenth is left free.
    """
    if limits.max_activation_bytes < float("inf"):
        return limits.max_activation_bytes
    return 0.9 * cluster.memory_bytes - fixed_bytes(memory, limits)


def fixed_bytes(memory: MemoryCost, limits: Limits) -> float:
    """Weights and optimizer states of one rank, gradients where they are kept, weights gathered from other ranks."""
    others = 1.0 - 1.0 / limits.num_ranks
    return memory.fixed_bytes - memory.sharded_bytes * others + (memory.gathered_bytes if others else 0.0)


def beside_of(memory: MemoryCost, layers: int) -> Beside:
    """What `Limits` carries of a stage's memory costs besides activations and prefix KV; ``layers`` of the stage."""
    values = {name: getattr(memory, name) for name in Beside._fields}
    return Beside(**values)._replace(cut_saves_bytes_per_token=memory.cut_saves_bytes_per_token / layers)


def peak_activation_bytes(plan: StepPlan, stage: int, rank: int) -> tuple[float, Op]:
    """Largest number of bytes that a plane rank of a stage holds, and the pass at which it does."""
    return _peak(plan, stage, orders_of_stage(plan, stage)[rank])


def peaks_of_stage(plan: StepPlan, stage: int, ranks: Iterable[int] | None = None) -> list[tuple[float, Op]]:
    """The same for these plane ranks; None: for all."""
    orders = orders_of_stage(plan, stage)
    return [_peak(plan, stage, orders[rank]) for rank in (range(len(orders)) if ranks is None else ranks)]


def _peak(plan: StepPlan, stage: int, ops: list[Op]) -> tuple[float, Op]:
    limits, beside = plan.limits, plan.limits.beside
    # A plan that says what is recomputed overrules the recipe.
    layers, recomputing = limits.layers_per_stage, limits.replay_bytes_per_token > 0 and not plan.recompute
    is_last = stage == limits.num_stages - 1
    head, head_working = (beside.head_bytes_per_token, beside.head_working_bytes_per_token) if is_last else (0.0, 0.0)
    input_per_token = limits.input_bytes_per_token
    whole_per_token = limits.replay_bytes_per_token or limits.activation_bytes_per_token
    lengths, all_cut = plan.sequences, plan.cut
    tokens_left: dict[int, int] = {}
    stored: dict[int, float] = {}
    gradients = beside.gradient_bytes
    held, peak, where = 0.0, 0.0, Op("F", 0)
    for op in ops:
        micro_batch = plan.passes(op.kind)[op.micro_batch]
        share = 1.0 / len(micro_batch.ranks)
        slots = share * micro_batch.num_slots
        recomputed = plan.recompute[stage][op.micro_batch] if plan.recompute else 0
        cut = [s for s in micro_batch.slices if s.sequence in all_cut] if all_cut else []
        layer = slots * whole_per_token
        if len(cut) == len(micro_batch.slices):
            # Beside whole sequences cut ones save nothing: queries, keys and values are copied where the two meet.
            layer -= share * sum(s.length for s in cut) * beside.cut_saves_bytes_per_token
        if recomputing:
            layer_input = slots * limits.activation_bytes_per_token
            kept = layer_input * layers + slots * head
        else:
            layer_input = slots * input_per_token
            kept = layer * (layers - recomputed) + layer_input * recomputed + slots * head
        inputs = slots * input_per_token if stage else 0.0
        if op.kind == "F":
            for s in cut:
                if s.sequence not in tokens_left:
                    length = tokens_left[s.sequence] = lengths[s.sequence].length
                    stored[s.sequence] = share * length * limits.kv_bytes_per_token * layers
                    held += stored[s.sequence]
            if op.micro_batch in plan.kept:
                held += kept
                now = held
            else:
                held += inputs
                now = held + layer
        else:
            replayed = plan.forward_of[op.micro_batch] is None
            begin, after = held, held - kept
            if replayed:
                begin = held + (layer * layers + slots * head if recomputing else kept)
                after = held - inputs
            late, gradients = gradients, 0.0
            booked = 0.0
            for s in cut:
                if tokens_left[s.sequence] == lengths[s.sequence].length:
                    of_prefix = share * s.start * limits.kv_grad_bytes_per_token * layers
                    stored[s.sequence] += of_prefix
                    booked += of_prefix
                tokens_left[s.sequence] -= s.length
            after += late + booked
            again = layer - layer_input if (recomputing and not replayed) or recomputed else 0.0
            mlp = slots * beside.working_bytes_per_token
            # Attention runs backward when some quarter of its layer is gone; its kernel gives dK, dV of the prefix too.
            attention = share * sum(s.stop for s in cut) * limits.kv_bytes_per_token - layer / 4
            at_head = begin + slots * head_working
            at_first = begin - slots * head + again + late / (2 * layers) + max(mlp, attention + booked / layers)
            at_last = after + layer - late / layers + max(mlp, attention)
            now = max(at_head, at_first, at_last) + beside.pass_bytes
            held = after - sum(stored.pop(i) for i in {s.sequence for s in cut} if not tokens_left[i])
        if now > peak:
            peak, where = now, op
    return peak, where
