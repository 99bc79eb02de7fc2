"""What a plan holds in memory, predicted, by a walk through the passes of a rank at a stage.

    forward, kept      + layers that are not recomputed, inputs of those that are, the head at the last stage
    forward, replayed  + the stage's input, behind the first stage
    forward, cut       + K and V of the whole sequence with its first slice (they are stored in one piece)
    backward           - what its forward kept; with a sequence's first one + dK and dV of all tokens before the last
                       slice, with its last one - K, V, dK and dV; with a step's first one + gradients that come late
    backward, split    + inputs of linear layers and gradients of their outputs, until its weight gradients are computed

A backward is highest where it begins (the head's working bytes), at its first layer or at its last one: a layer that is
recomputed, and what a layer's MLP or its attention takes while it runs. Head: final norm, output layer and loss.

Of a shared micro-batch a rank holds the activations of its own tokens (`parts.tokens_of_ranks`), and K and V of the
slices of whose CP group it is a member. What waits in host memory (`StepPlan.offload`) is not held, but for one layer's
share on its way.

Left out: what one kernel takes and gives back, buffers of communication (K and V of other ranks among them, and of all
tokens in an all-gather), key heads that several ranks keep, tensors on their way between stages, and of moved tokens
that their queries, keys and values are kept by the rank that attends for them.
Coefficients: `costs.MemoryCost`; docs/costs.md has the measured errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ..machine.cluster import Cluster
from ..plan.limits import Beside, Limits
from ..plan.order import orders_of_stage
from ..plan.step_plan import MicroBatch, Op, PassKind, Slice, StepPlan, fact_of_plan
from ..plan.token_layout import tokens_of_ranks
from .costs import MemoryCost, is_even
from .offload import KEPT_LAYERS, layers_on_device


def activation_budget_bytes(cluster: Cluster, memory: MemoryCost, limits: Limits) -> float:
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
    return peaks_of_stage(plan, stage, [rank])[0]


def peaks_of_stage(plan: StepPlan, stage: int, ranks: Iterable[int] | None = None) -> list[tuple[float, Op]]:
    """The same for these plane ranks; None: for all."""
    found = []
    for ops, levels in _walks(plan, stage, ranks):
        peak = max(levels, default=0.0)
        found.append((peak, ops[levels.index(peak)]) if peak > 0 else (0.0, Op("F", 0)))
    return found


def levels_of_stage(plan: StepPlan, stage: int) -> list[list[float]]:
    """The most that every plane rank of a stage holds in each pass of its order (`order.orders_of_stage`) [bytes]."""
    return [levels for _, levels in _walks(plan, stage, None)]


def _walks(plan: StepPlan, stage: int, ranks: Iterable[int] | None) -> Iterator[tuple[list[Op], list[float]]]:
    orders = orders_of_stage(plan, stage)
    for rank in range(len(orders)) if ranks is None else ranks:
        yield orders[rank], _levels(plan, stage, orders[rank], _parts_of(plan, orders[rank], rank))


def offloaded_bytes(plan: StepPlan, stage: int, number: int, tokens: Any) -> Any:
    """What of a kept micro-batch of the forward waits in host memory, for the tokens (a number, an array) of a rank."""
    limits = plan.limits
    recomputed = plan.recompute[stage][number] if plan.recompute else 0
    kept = limits.activation_bytes_per_token * (limits.layers_per_stage - recomputed)
    return tokens * (kept + limits.input_bytes_per_token * recomputed) * _offloaded_share(plan, number)


def _offloaded_share(plan: StepPlan, number: int) -> float:
    """Of the layers' activations of a micro-batch of the forward."""
    layers = plan.limits.layers_per_stage
    return 1.0 - layers_on_device(layers, plan.offload[number]) / layers if plan.offload else 0.0


class _Part(NamedTuple):
    """What a rank has of a micro-batch."""

    tokens: float
    cut: tuple[tuple[Slice, float], ...]
    """Slices of cut sequences that it attends for, each with its share of them."""
    all_cut: bool
    """All of its slices are of cut sequences."""


def _parts_of(plan: StepPlan, ops: list[Op], rank: int) -> list[_Part]:
    """What a rank has of the micro-batches of its passes."""
    forward, backward = _parts_of_direction(plan, "F"), _parts_of_direction(plan, "B" if plan.backward else "F")
    out = []
    for kind, number in ops:
        parts = (forward if kind == "F" else backward)[number]
        out.append(parts if isinstance(parts, _Part) else parts[rank])
    return out


@fact_of_plan("lengths", "micro_batches", "backward")
def _parts_of_direction(plan: StepPlan, kind: PassKind) -> list[_Part | dict[int, _Part]]:
    """Of each micro-batch what any of its ranks has, or each of them where they have unlike work."""
    return [_even_part(plan, m) if is_even(m) else _uneven_parts(plan, m) for m in plan.passes(kind)]


def _even_part(plan: StepPlan, micro_batch: MicroBatch) -> _Part:
    """Of each of its ranks."""
    share = 1.0 / len(micro_batch.ranks)
    cut = tuple((s, share) for s in micro_batch.slices if s.sequence in plan.cut) if plan.cut else ()
    return _Part(share * micro_batch.num_padded_tokens, cut, len(cut) == len(micro_batch.slices))


def _uneven_parts(plan: StepPlan, micro_batch: MicroBatch) -> dict[int, _Part]:
    """Of a micro-batch that gives its ranks unlike work."""
    tokens = tokens_of_ranks(micro_batch)
    cut: dict[int, list[tuple[Slice, float]]] = {rank: [] for rank in tokens}
    whole: set[int] = set()
    cp_groups = micro_batch.cp_groups or (micro_batch.ranks,) * len(micro_batch.slices)
    for s, cp_group in zip(micro_batch.slices, cp_groups, strict=True) if plan.cut else ():
        if s.sequence not in plan.cut:
            whole.update(cp_group)
            continue
        for rank in cp_group:
            cut[rank].append((s, 1.0 / len(cp_group)))
    return {rank: _Part(n, tuple(cut[rank]), bool(cut[rank]) and rank not in whole) for rank, n in tokens.items()}


def _levels(plan: StepPlan, stage: int, ops: list[Op], mine: list[_Part]) -> list[float]:
    """The most that a rank holds in each of its passes ``ops``, of whose micro-batches it has ``mine``."""
    limits, beside = plan.limits, plan.limits.beside
    # A plan that says what is recomputed overrules the recipe.
    layers, recomputing = limits.layers_per_stage, limits.replay_bytes_per_token > 0 and not plan.recompute
    is_last = stage == limits.num_stages - 1
    head, head_working = (beside.head_bytes_per_token, beside.head_working_bytes_per_token) if is_last else (0.0, 0.0)
    input_per_token = limits.input_bytes_per_token
    whole_per_token = limits.replay_bytes_per_token or limits.activation_bytes_per_token
    # Of cut sequences: tokens of the slices that this rank shares, and how many of them are its own.
    total: dict[int, int] = {}
    own: dict[int, float] = {}
    for op, part in zip(ops, mine, strict=True) if plan.cut else ():
        for s, share in part.cut if op.kind == "F" else ():
            total[s.sequence] = total.get(s.sequence, 0) + s.length
            own[s.sequence] = own.get(s.sequence, 0.0) + share * s.length
    tokens_left: dict[int, int] = {}
    stored: dict[int, float] = {}
    gradients = beside.gradient_bytes
    held = 0.0
    levels: list[float] = []
    split = plan.split[stage] if plan.split else frozenset()
    for op, (slots, cut, all_cut) in zip(ops, mine, strict=True):
        deferred = slots * limits.deferred_bytes_per_token * layers if op.micro_batch in split else 0.0
        if op.kind == "W":
            levels.append(held + beside.pass_bytes)
            held -= deferred
            continue
        recomputed = plan.recompute[stage][op.micro_batch] if plan.recompute else 0
        layer = slots * whole_per_token
        if all_cut:
            # Beside whole sequences cut ones save nothing: queries, keys and values are copied where the two meet.
            layer -= sum(share * s.length for s, share in cut) * beside.cut_saves_bytes_per_token
        if recomputing:
            layer_input = slots * limits.activation_bytes_per_token
            kept = layer_input * layers
        else:
            layer_input = slots * input_per_token
            kept = layer * (layers - recomputed) + layer_input * recomputed
        number = op.micro_batch if op.kind == "F" else plan.forward_of[op.micro_batch]
        moving = 0.0
        if plan.offload and number is not None:
            # One layer is on its way while the next one computes.
            moving = plan.offload[number] * kept / layers if layers > KEPT_LAYERS else 0.0
            kept *= 1.0 - _offloaded_share(plan, number)
        kept += slots * head
        inputs = slots * input_per_token if stage else 0.0
        if op.kind == "F":
            for s, _ in cut:
                if s.sequence not in tokens_left:
                    tokens_left[s.sequence] = total[s.sequence]
                    stored[s.sequence] = own[s.sequence] * limits.kv_bytes_per_token * layers
                    held += stored[s.sequence]
            if op.micro_batch in plan.kept:
                held += kept
                now = held
            else:
                held += inputs
                now = held + layer
        else:
            replayed = plan.forward_of[op.micro_batch] is None
            begin, after = held + moving, held - kept
            if replayed:
                begin = held + (layer * layers + slots * head if recomputing else kept)
                after = held - inputs
            after += deferred
            late, gradients = gradients, 0.0
            booked = 0.0
            for s, share in cut:
                if tokens_left[s.sequence] == total[s.sequence]:
                    before = own[s.sequence] - share * s.length
                    of_prefix = before * limits.kv_grad_bytes_per_token * layers
                    stored[s.sequence] += of_prefix
                    booked += of_prefix
                tokens_left[s.sequence] -= s.length
            after += late + booked
            again = layer - layer_input if (recomputing and not replayed) or recomputed else 0.0
            mlp = slots * beside.working_bytes_per_token
            # Attention runs backward when some quarter of its layer is gone; its kernel gives dK, dV of the prefix too.
            attention = sum(share * s.stop for s, share in cut) * limits.kv_bytes_per_token - layer / 4
            at_head = begin + slots * head_working
            at_first = begin - slots * head + again + late / (2 * layers) + max(mlp, attention + booked / layers)
            at_last = after + layer - late / layers + max(mlp, attention)
            now = max(at_head, at_first, at_last) + beside.pass_bytes
            held = after - sum(stored.pop(i) for i in {s.sequence for s, _ in cut} if not tokens_left[i])
        levels.append(now)
    return levels
