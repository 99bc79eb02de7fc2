"""Keys and values of sequences that are cut into slices, kept from the first forward to the last backward of each.

Shape legend: L = tokens of a sequence, N = tokens of a slice, P = tokens before it, G = key/value heads, D = head
dimension.

Where ranks share a sequence, each store has the tokens that its rank attends for, in a numbering of their own ("local",
`PrefixStore.local`): those of the first slice, then those of the second, and so on. All here is said in it, so L and P
count tokens of this rank.

Later slices read what earlier ones wrote; backward, each slice leaves dK and dV for the tokens before it. Per layer and
sequence there is one buffer [L, G, D] for K and one for V, and one accumulator each for dK and dV of all tokens but
those of the last slice. Everything is freed with the backward of the first slice, or where no backward comes with the
forward of the last one (`PrefixStore.release`).

The legal order, forward ascending and then backward descending, is checked at every access: another order would give
wrong gradients without any other sign. A forward that runs again (a replay, or activation checkpointing) finds its keys
and values there and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.step_plan import Slice, StepPlan
from ...core.plan.token_layout import attended, cp_group_of


@dataclass
class _Entry:
    k_LGD: Tensor
    v_LGD: Tensor
    written: int
    """Tokens whose keys and values are there: [0, written)."""
    unsettled: int
    """Tokens whose backward has not run: [0, unsettled)."""
    dk_PGD: Tensor | None = None
    dv_PGD: Tensor | None = None
    frozen: bool = False
    """No backward will come: neither queries nor keys nor values need gradients."""


Ranges = Mapping[int, Mapping[int, Mapping[int, tuple[int, int]]]]


class PrefixStore:
    """Prefix keys and values, and their gradients, of one step on one rank and pipeline stage.

    Args:
        lengths: tokens that this rank has of each sequence that is cut, by its index in the global batch.
        ranges: for each of them that ranks share, by the start of a slice, what each plane rank has of the slice:
            [first, end) in that rank's own numbering.
        rank: this plane rank; only needed with ``ranges``.
    """

    def __init__(self, lengths: Mapping[int, int], ranges: Ranges | None = None, rank: int = 0) -> None:
        self._lengths = dict(lengths)
        self._ranges = ranges or {}
        self.rank = rank
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._done: set[tuple[int, int]] = set()

    @classmethod
    def of_plan(cls, plan: StepPlan, dp_cp_rank: int | None = None) -> PrefixStore | None:
        """The store of a step; None where the plan cuts no sequence. ``dp_cp_rank``: of this process; needed where the
        plan shares micro-batches."""
        lengths = {i: int(plan.lengths[i]) for i in plan.cut}
        if not lengths or not plan.shared:
            return cls(lengths) if lengths else None
        assert dp_cp_rank is not None, "a plan that shares micro-batches has another store on each rank"
        ranges = _ranges(plan)
        for sequence, starts in ranges.items():
            ends = [ranks[dp_cp_rank][1] for ranks in starts.values() if dp_cp_rank in ranks]
            lengths[sequence] = max(ends, default=0)
        return cls(lengths, ranges, dp_cp_rank)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._lengths

    def local(self, piece: Slice) -> Slice:
        """What this rank has of a slice of the plan, in the numbering of this store."""
        starts = self._ranges.get(piece.sequence)
        return piece if starts is None else Slice(piece.sequence, *starts[piece.start][self.rank])

    def before(self, piece: Slice, rank: int) -> int:
        """Tokens that a plane rank of the slice's CP group has of the slices before it."""
        starts = self._ranges.get(piece.sequence)
        return piece.start if starts is None else starts[piece.start][rank][0]

    def write(
        self, layer: int, piece: Slice, k_NGD: Tensor, v_NGD: Tensor, *, frozen: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of a slice, unless they are there.

        Args:
            layer: any number that no other layer of this pipeline stage has.
            frozen: autograd is on and none of the tensors needs a gradient, so that no backward will come.

        Returns:
            Views of the keys and values of the slice and all tokens before it, [P + N, G, D] each.

        Raises:
            EvenloadError: tokens before the slice are missing, its backward has run, or it is not in its sequence.
        """
        key = layer, piece.sequence
        length = self._lengths[piece.sequence]
        if piece.stop > length:
            raise _disorder("a slice is longer than its sequence", layer, piece, f"a sequence of {length} tokens")
        entry = self._entries.get(key)
        if key in self._done or (entry is not None and piece.stop > entry.unsettled):
            raise _disorder("a slice runs forward after its backward", layer, piece)
        if entry is None:
            k_LGD, v_LGD = (x.new_empty(length, *x.shape[1:]) for x in (k_NGD, v_NGD))
            entry = self._entries[key] = _Entry(k_LGD, v_LGD, written=0, unsettled=length)
        entry.frozen |= frozen
        if piece.stop > entry.written:
            if piece.start != entry.written:
                raise _disorder("a slice runs forward out of order", layer, piece, f"{entry.written} tokens before it")
            entry.k_LGD[piece.start : piece.stop] = k_NGD
            entry.v_LGD[piece.start : piece.stop] = v_NGD
            entry.written = piece.stop
        return entry.k_LGD[: piece.stop], entry.v_LGD[: piece.stop]

    def read(self, layer: int, piece: Slice) -> tuple[Tensor, Tensor]:
        """What `write` returned, for the backward of a slice. Raises EvenloadError where it is not its turn."""
        entry = self._entries.get((layer, piece.sequence))
        if entry is None or piece.stop != entry.unsettled:
            turn = f"the turn of the slice that ends at {entry.unsettled}" if entry else "its sequence is done"
            raise _disorder("a slice runs backward out of order", layer, piece, turn)
        if entry.written < len(entry.k_LGD):
            progress = f"{entry.written} of {len(entry.k_LGD)} tokens have run forward"
            raise _disorder(
                "a slice runs backward before all slices of its sequence ran forward", layer, piece, progress
            )
        return entry.k_LGD[: piece.stop], entry.v_LGD[: piece.stop]

    def settle(self, layer: int, piece: Slice, dk_PNGD: Tensor, dv_PNGD: Tensor) -> tuple[Tensor, Tensor]:
        """Book the gradients that a slice's backward gives for itself and all tokens before it, [P + N, G, D] each.

        Returns:
            The whole gradients of the slice's own keys and values, [N, G, D] each, in float32 at least; views that stay
            valid until the next call.
        """
        entry = self._entries[layer, piece.sequence]
        if entry.dk_PGD is None or entry.dv_PGD is None:
            entry.dk_PGD, entry.dv_PGD = (_wide(grad[: piece.start]) for grad in (dk_PNGD, dv_PNGD))
            own = _wide(dk_PNGD[piece.start :]), _wide(dv_PNGD[piece.start :])
        else:
            entry.dk_PGD[: piece.stop].add_(dk_PNGD)
            entry.dv_PGD[: piece.stop].add_(dv_PNGD)
            own = entry.dk_PGD[piece.start : piece.stop], entry.dv_PGD[piece.start : piece.stop]
        entry.unsettled = piece.start
        if piece.start == 0:
            del self._entries[layer, piece.sequence]
            self._done.add((layer, piece.sequence))
        return own

    def release(self, sequence: int) -> None:
        """Free the keys and values of a sequence whose slices have all run forward, and of which no backward comes."""
        for key in [key for key in self._entries if key[1] == sequence]:
            del self._entries[key]
            self._done.add(key)

    def check_empty(self) -> None:
        """Free what is left; return if every gradient has arrived. Raises EvenloadError: the backward of some slice did
        not run, or its loss was not connected to the output."""
        left = [(key, entry.unsettled) for key, entry in self._entries.items() if not entry.frozen]
        self._entries = {}
        if left:
            (layer, sequence), tokens = left[0]
            raise EvenloadError(
                "the backward of a slice is missing at the end of the step",
                f"tokens before {tokens} of sequence {sequence} in layer {layer}; {len(left)} such",
                "run the backward of every slice; the loss of one without labels is its output times zero",
            )


def _ranges(plan: StepPlan) -> Ranges:
    """What each rank has of each slice of the cut sequences that ranks share."""
    ranges_of: dict[int, dict[int, dict[int, tuple[int, int]]]] = {}
    spread = set()
    for micro_batch in plan.micro_batches:
        for number, piece in enumerate(micro_batch.slices):
            if piece.sequence not in plan.cut:
                continue
            cp_group, starts = cp_group_of(micro_batch, number), ranges_of.setdefault(piece.sequence, {})
            spread |= {piece.sequence} if len(cp_group.ranks) > 1 else set()
            ranks = {}
            for place, rank in enumerate(cp_group.ranks):
                first = max((earlier[rank][1] for earlier in starts.values() if rank in earlier), default=0)
                ranks[rank] = first, first + sum(p.length for p in attended(piece, cp_group, place))
            starts[piece.start] = ranks
    return {sequence: starts for sequence, starts in ranges_of.items() if sequence in spread}


def _wide(grad: Tensor) -> Tensor:
    """A copy in float32 at least."""
    return grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)


def _disorder(what: str, layer: int, piece: Slice, detail: str = "") -> EvenloadError:
    where = f"tokens {piece.start} to {piece.stop} of sequence {piece.sequence}, layer {layer}"
    return EvenloadError(
        what,
        f"{where}; {detail}" if detail else where,
        "run the slices of a sequence forward in order, then backward in reverse, each once a step",
    )
