"""The walk through the passes of a rank at a stage: what the rank has of their micro-batches, and what it holds in each
of them (`core.costs.memory`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..plan.program import forwards_that_run
from ..plan.step_plan import MicroBatch, Op, PassKind, Slice, StepPlan, fact_of_plan
from ..plan.token_layout import tokens_of_ranks
from .costs import is_even
from .offload import KEPT_LAYERS, layers_on_device
from .rounds import rounds_of


class Part(NamedTuple):
    """What a rank has of a micro-batch."""

    tokens: float
    """Of its own, padding included."""
    cut: tuple[tuple[int, int, float], ...]
    """For each slice of a cut sequence that it attends for: the sequence, the slice's tokens, its own share of them."""
    saving: float
    """Of ``tokens`` those that keep less, as their K and V are stored: all or none (queries, keys and values are
    copied where cut sequences meet whole ones)."""
    attended: float
    """Its share of all tokens that the slices of cut sequences attend to."""


def _part(tokens: float, cut: list[tuple[Slice, float]], all_cut: bool) -> Part:
    """A part of ``tokens`` and slices of cut sequences, each with the share of a rank; ``all_cut``: no others."""
    own = tuple((s.sequence, s.length, share * s.length) for s, share in cut)
    saving = sum(share for _, _, share in own) if all_cut else 0.0
    return Part(tokens, own, saving, sum(share * s.stop for s, share in cut))


def parts_of(plan: StepPlan, ops: list[Op], rank: int) -> list[Part]:
    """What a rank has of the micro-batches of its passes."""
    forward, backward = _parts_of_direction(plan, "F"), _parts_of_direction(plan, "B" if plan.backward else "F")
    out = []
    for kind, number in ops:
        parts = (forward if kind == "F" else backward)[number]
        out.append(parts if isinstance(parts, Part) else parts[rank])
    return out


@fact_of_plan("lengths", "micro_batches", "backward")
def _parts_of_direction(plan: StepPlan, kind: PassKind) -> list[Part | dict[int, Part]]:
    """What any rank has of each micro-batch, or what each rank has where they have unlike work."""
    return [_even_part(plan, m) if is_even(m) else _uneven_parts(plan, m) for m in plan.passes(kind)]


def _even_part(plan: StepPlan, micro_batch: MicroBatch) -> Part:
    share = 1.0 / len(micro_batch.ranks)
    cut = [(s, share) for s in micro_batch.slices if s.sequence in plan.cut] if plan.cut else []
    return _part(share * micro_batch.num_padded_tokens, cut, len(cut) == len(micro_batch.slices))


def _uneven_parts(plan: StepPlan, micro_batch: MicroBatch) -> dict[int, Part]:
    tokens = tokens_of_ranks(micro_batch)
    cut: dict[int, list[tuple[Slice, float]]] = {rank: [] for rank in tokens}
    whole: set[int] = set()
    for s, cp_group in zip(micro_batch.slices, micro_batch.ranks_of_slices, strict=True) if plan.cut else ():
        if s.sequence not in plan.cut:
            whole.update(cp_group)
            continue
        for rank in cp_group:
            cut[rank].append((s, 1.0 / len(cp_group)))
    return {rank: _part(n, cut[rank], rank not in whole) for rank, n in tokens.items()}


def kept_share(plan: StepPlan, stage: int, number: int) -> float:
    """The share of its layers' activations that a micro-batch of the forward does not leave in host memory."""
    layers = plan.limits.at(stage).layers_per_stage
    return layers_on_device(layers, plan.offload[number]) / layers if plan.offload else 1.0


@dataclass(slots=True)
class _Stored:
    """The K and V that a rank stores of a cut sequence, and later their gradients."""

    tokens: int = 0
    """Tokens of the slices for which the rank attends."""
    own: float = 0.0
    """The rank's share of ``tokens``."""
    tokens_left: int = 0
    """Those of ``tokens`` that are still to run backward, from the sequence's first forward on."""
    stored_bytes: float = 0.0


class Walk:
    """The passes of a rank at a stage, one after the other, and what the rank holds after those that have run."""

    def __init__(self, plan: StepPlan, stage: int) -> None:
        limits = plan.limits.at(stage)
        memory = limits.memory
        self._plan, self._stage = plan, stage
        self._memory = memory
        self._layers = limits.layers_per_stage
        self._recomputed = plan.recompute[stage] if plan.recompute else ()
        # A plan that says what is recomputed overrules the recipe.
        self._recomputes_all = memory.replay_bytes_per_token > 0 and not plan.recompute
        whole = memory.replay_bytes_per_token or memory.activation_bytes_per_token
        self._layer = whole / self._layers
        self._layer_input = memory.activation_bytes_per_token / self._layers
        if not self._recomputes_all:
            self._layer_input = memory.input_bytes_per_token
        self._at_experts = memory.expert_bytes_per_token / self._layers
        shares = limits.in_step > 1 and self._at_experts > 0
        self._rounds = rounds_of(plan, stage, limits.in_step) if shares else {}
        self._saves = memory.cut_saves_bytes_per_token / self._layers
        self._attention = memory.kv_bytes_per_token / self._layers
        is_last = stage == limits.num_stages - 1
        self._head = memory.head_bytes_per_token if is_last else 0.0
        self._head_working = memory.head_working_bytes_per_token if is_last else 0.0
        self._stage_input = memory.input_bytes_per_token if stage else 0.0
        self._split = plan.split[stage] if plan.split else frozenset()
        self._kept, self._forward_of = plan.kept, plan.forward_of
        self._runs, self._slots = forwards_that_run(plan, is_last), plan.slots["F"]
        self._late_bytes = memory.gradient_bytes
        self._live_bytes = 0.0
        self._sequences: dict[int, _Stored] = {}

    @property
    def held_bytes(self) -> float:
        """What the rank holds after the passes that have run."""
        return self._live_bytes

    def levels(self, ops: list[Op], parts: list[Part]) -> list[float]:
        """The most that the rank holds in each of its passes [bytes]; ``parts``: what it has of their micro-batches."""
        return list(self.passes(ops, parts))

    def passes(self, ops: list[Op], parts: list[Part]) -> Iterator[float]:
        """`levels`, one after the other."""
        for op, part in zip(ops, parts, strict=True) if self._plan.cut else ():
            for number, tokens, own in part.cut if op.kind == "F" else ():
                sequence = self._sequences.setdefault(number, _Stored())
                sequence.tokens += tokens
                sequence.own += own
        passes = {"F": self._forward, "B": self._backward, "W": self._weights}
        for op, part in zip(ops, parts, strict=True):
            yield passes[op.kind](op.micro_batch, part)

    def _forward(self, number: int, part: Part) -> float:
        layer, _, kept, _ = self._bytes_of(part, number, number)
        if number in self._kept:
            for sequence, _, _ in part.cut:
                self._store(self._sequences[sequence])
            self._live_bytes += kept
            return self._live_bytes
        self._live_bytes += part.tokens * self._stage_input
        runs = self._runs[number]
        if runs is None:
            return self._live_bytes
        computed = {s.sequence for s in runs.slices}
        for sequence, _, _ in part.cut:
            if sequence in computed:
                self._store(self._sequences[sequence])
        return self._live_bytes + layer * runs.num_padded_tokens / self._slots[number]

    def _backward(self, number: int, part: Part) -> float:
        layer, layer_input, kept, moving = self._bytes_of(part, number, self._forward_of[number])
        tokens, layers, memory = part.tokens, self._layers, self._memory
        again = layer - layer_input if self._recomputed and self._recomputed[number] else 0.0
        if self._forward_of[number] is None:
            for sequence, _, _ in part.cut:  # a whole backward of a sequence that no forward had to store
                self._store(self._sequences[sequence])
            begin = self._live_bytes + (layer * layers + tokens * self._head if self._recomputes_all else kept)
            after = self._live_bytes - tokens * self._stage_input
        else:
            begin, after = self._live_bytes + moving, self._live_bytes - kept
            again = layer - layer_input if self._recomputes_all else again
        if number in self._split:
            after += tokens * memory.deferred_bytes_per_token
        late, self._late_bytes = self._late_bytes, 0.0
        booked = self._book(part) if part.cut else 0.0
        after += late + booked
        mlp = tokens * memory.working_bytes_per_token
        # Attention runs backward when some quarter of its layer is gone; its kernel gives dK, dV of the prefix too.
        attention = part.attended * self._attention - layer / 4
        at_head = begin + tokens * self._head_working
        first = begin - tokens * self._head + again + late / (2 * layers)
        at_first = first + max(mlp, attention + booked / layers)
        at_last = after + layer - late / layers + max(mlp, attention)
        self._live_bytes = after - (self._let_go(part) if part.cut else 0.0)
        return max(at_head, at_first, at_last) + memory.pass_bytes

    def _weights(self, number: int, part: Part) -> float:
        level = self._live_bytes + self._memory.pass_bytes
        self._live_bytes -= part.tokens * self._memory.deferred_bytes_per_token
        return level

    def _bytes_of(self, part: Part, number: int, forward: int | None) -> tuple[float, float, float, float]:
        """What a pass holds, whatever ran before it [bytes]; ``forward``: what keeps something for it, None: a replay.
        One layer with all that its backward needs; one layer that is recomputed; all layers and the head from forward
        to backward; the part of a layer that is on its way from host memory while another one computes."""
        layer, layer_input = part.tokens * self._layer, part.tokens * self._layer_input
        if self._rounds:
            # The tokens at a rank's experts are those of the round of its forward, if that is kept.
            brought = self._rounds[Op("B", number) if forward is None else Op("F", forward)]
            layer += (brought.mean - part.tokens) * self._at_experts
        if part.saving:
            layer -= part.saving * self._saves
        if self._recomputes_all:
            kept = layer_input * self._layers
        else:
            recomputed = self._recomputed[number] if self._recomputed else 0
            kept = layer * (self._layers - recomputed) + layer_input * recomputed
        moving = 0.0
        if self._plan.offload and forward is not None:
            # One layer is on its way while the next one computes.
            moving = self._plan.offload[forward] * kept / self._layers if self._layers > KEPT_LAYERS else 0.0
            kept *= kept_share(self._plan, self._stage, forward)
        return layer, layer_input, kept + part.tokens * self._head, moving

    def _store(self, sequence: _Stored) -> None:
        if not sequence.tokens_left:
            sequence.tokens_left = sequence.tokens
            sequence.stored_bytes = sequence.own * self._memory.kv_bytes_per_token
            self._live_bytes += sequence.stored_bytes

    def _book(self, part: Part) -> float:
        """The bytes of dK and dV of the sequences whose first backward this is: of all tokens before the slice."""
        booked_bytes = 0.0
        for number, tokens, own in reversed(part.cut):  # a second half's comes first
            sequence = self._sequences[number]
            if sequence.tokens_left == sequence.tokens:
                prefix_bytes = (sequence.own - own) * self._memory.kv_grad_bytes_per_token
                sequence.stored_bytes += prefix_bytes
                booked_bytes += prefix_bytes
            sequence.tokens_left -= tokens
        return booked_bytes

    def _let_go(self, part: Part) -> float:
        """The bytes of K, V, dK and dV of the sequences whose last backward this was."""
        ended = {number for number, _, _ in part.cut if not self._sequences[number].tokens_left}
        return sum(self._sequences[number].stored_bytes for number in ended)
