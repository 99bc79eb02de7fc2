"""Keys and values of sequences that are cut into slices, kept from the first forward to the last backward of each.

Shape legend: L = tokens of a sequence, G = key/value heads, D = head dimension.

Later slices read what earlier ones wrote; backward, each slice leaves dK and dV for the slices before it. Per layer and
sequence there is one buffer [L, G, D] for K and one for V, and one accumulator each for dK and dV. All are freed with
the backward of the first slice. The legal order, forward ascending, then backward descending, is checked at every
access: another order would give wrong gradients without any other sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import EvenloadError
from ..core.workload import Slice, StepPlan


@dataclass
class _Entry:
    """One sequence in one layer."""

    k_LGD: Tensor
    v_LGD: Tensor
    left: int
    """Tokens whose backward has not run: those before this place."""
    written: int = 0
    """Tokens whose K and V are there."""
    dk_PGD: Tensor | None = None
    dv_PGD: Tensor | None = None
    """Of the `left` first tokens, from the backward of the tokens behind them."""
    frozen: bool = False
    """Neither queries, keys nor values need gradients, so no backward will come."""


class PrefixStore:
    """Prefix keys and values, and their gradients, of one step on one rank and pipeline stage.

    Args:
        lengths: tokens of each sequence that is cut, by its index in the global batch.
    """

    def __init__(self, lengths: Mapping[int, int]) -> None:
        self._lengths = dict(lengths)
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._done: set[tuple[int, int]] = set()

    @classmethod
    def of_plan(cls, plan: StepPlan) -> PrefixStore | None:
        """The store of a step; None where the plan cuts no sequence."""
        lengths = {s.index: s.length for s in plan.sequences if s.index in plan.cut}
        return cls(lengths) if lengths else None

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._lengths

    def length(self, sequence: int) -> int:
        """Tokens of a sequence that is cut."""
        return self._lengths[sequence]

    def write(self, layer: int, piece: Slice, k_NGD: Tensor, v_NGD: Tensor, frozen: bool = False) -> None:
        """Keep the keys and values of a slice; does nothing where they are there (a forward that runs again).

        Args:
            frozen: autograd is on and none of the tensors needs a gradient, so that no backward will come.

        Raises:
            EvenloadError: tokens before the slice are missing, or its sequence is done in this layer.
        """
        key = layer, piece.sequence
        if key in self._done:
            raise _disorder("runs forward after the last backward of its sequence", layer, piece)
        entry = self._entries.get(key)
        if entry is None:
            length = self._lengths[piece.sequence]
            entry = _Entry(*(x.new_empty(length, *x.shape[1:]) for x in (k_NGD, v_NGD)), left=length)
            self._entries[key] = entry
        entry.frozen = entry.frozen or frozen
        if piece.stop <= entry.written:
            return
        if piece.start != entry.written:
            raise _disorder("runs forward out of order", layer, piece, f"{entry.written} tokens have run")
        entry.k_LGD[piece.start : piece.stop] = k_NGD
        entry.v_LGD[piece.start : piece.stop] = v_NGD
        entry.written = piece.stop

    def read(self, layer: int, piece: Slice) -> tuple[Tensor, Tensor]:
        """Views of the keys and values of a slice and everything before it: [stop, G, D] each."""
        entry = self._entries[layer, piece.sequence]
        return entry.k_LGD[: piece.stop], entry.v_LGD[: piece.stop]

    def begin_backward(self, layer: int, piece: Slice) -> tuple[Tensor, Tensor]:
        """What `read` gives, after checking that it is the turn of this slice."""
        entry = self._entries.get((layer, piece.sequence))
        if entry is None:
            raise _disorder("runs backward twice", layer, piece)
        if entry.written < len(entry.k_LGD):
            raise _disorder("runs backward before its sequence has run forward", layer, piece)
        if piece.stop != entry.left:
            raise _disorder("runs backward out of order", layer, piece, f"the turn of token {entry.left - 1}")
        return self.read(layer, piece)

    def book(self, layer: int, piece: Slice, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Add gradients of [0, stop) to what later slices left; give those of the slice itself: [n, G, D] each."""
        entry = self._entries[layer, piece.sequence]
        own = []
        for name, grad in (("dk_PGD", dk), ("dv_PGD", dv)):
            total = grad.to(torch.promote_types(grad.dtype, torch.float32))
            left = getattr(entry, name)
            if left is not None:
                total = total + left
            own.append(total[piece.start :].to(grad.dtype))
            setattr(entry, name, total[: piece.start].clone())
        entry.left = piece.start
        if piece.start == 0:
            del self._entries[layer, piece.sequence]
            self._done.add((layer, piece.sequence))
        return own[0], own[1]

    def check_empty(self) -> None:
        """Return if every gradient has arrived.

        Raises:
            EvenloadError: the backward of some slice did not run, or its loss was not connected to the output.
        """
        waiting = [key for key, entry in self._entries.items() if not entry.frozen]
        self._entries = {}
        if waiting:
            layer, sequence = waiting[0]
            raise EvenloadError(
                "gradients of a prefix are left over at the end of the step",
                f"sequence {sequence} in layer {layer}, {len(waiting)} in all",
                "run the backward of every slice; one without labels needs its loss times zero, not a constant",
            )


def _disorder(what: str, layer: int, piece: Slice, found: str = "") -> EvenloadError:
    return EvenloadError(
        f"a slice {what}",
        f"tokens {piece.start} to {piece.stop} of sequence {piece.sequence}, layer {layer}"
        + (f"; {found}" if found else ""),
        "run slices forward in order, backward in reverse, each once per step",
    )
