"""What the losses of routers weigh in a loop that somebody else wrote.

Such a loop gives a token, or a sequence, a weight that depends on the micro-batch in which it came. It keeps that
weight wherever a plan computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.aliases import Floats
from ..attention.copy_rows import sent
from ..attention.pack import Pack

REPORTED_Z, REPORTED_SEQUENCE = "z_loss", "seq_load_balancing_loss"
"""The losses of routers by the names under which Megatron-Core reports them."""

Report = Callable[[str, int, Tensor], None]
"""Is told the name of a loss, its layer (from 1) and its sum over tokens of this rank, without a coefficient."""


class LoopWeights(NamedTuple):
    """By sequence of the step, float64 [S] each."""

    token_S: Floats
    """In the gradient: of the z-loss of each of its tokens."""
    sequence_S: Floats
    """In the gradient: of its balance loss."""
    reported_token_S: Floats
    """In what the loop reports: of the z-loss of each of its tokens."""
    reported_sequence_S: Floats
    """In what the loop reports: of its balance loss."""
    report: Report


def of_slots(values_S: Floats, pack: Pack, like_T: Tensor) -> Tensor:
    """A value of each sequence for the slots of a pack, in the type of ``like_T``; 0 on padding and in a dummy [T]."""
    values_T = torch.zeros(pack.num_padded_tokens, dtype=torch.float64)
    for piece, first in zip(pack.slices, pack.segments, strict=False):
        values_T[first : first + piece.length] = float(values_S[piece.sequence])
    return sent(values_T, like_T.device).to(like_T.dtype)
