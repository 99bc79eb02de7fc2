"""What the ranks of a plan have of its micro-batches, as far as memory goes; the walk adds up their bytes."""

from __future__ import annotations

from typing import NamedTuple

from ..plan.step_plan import MicroBatch, Op, PassKind, Slice, StepPlan, fact_of_plan
from ..plan.token_layout import tokens_of_ranks
from .costs import is_even


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
