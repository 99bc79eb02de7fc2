"""Which tokens of a global batch carry loss, and how many do: the one divisor of every token loss.

A prompt, padding or whatever else a model is not to learn carries none, but is attended to. A label stands at the place
of its token: the token before it predicts it, also across the border of two slices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...core.plan.step_plan import Lengths
from .pack import TokensOf


class Labels(NamedTuple):
    """The targets of a global batch. In place of Labels, None says that each token but a sequence's first is one."""

    of: TokensOf
    """int64 [length] of a sequence by its place in the global batch: what each token counts as where it is a target,
    `pack.IGNORE` where it carries no loss. The first token is never a target, whatever stands there."""
    targets: npt.NDArray[np.int64]
    """Number of targets of each sequence [N]."""


def count_targets(lengths: Lengths, labels: Labels | None = None) -> int:
    """Target tokens of a global batch: the one divisor of every token loss, on every rank and in every micro-batch."""
    return int(np.maximum(lengths - 1, 0).sum() if labels is None else labels.targets.sum())


def labels_of(labels: Labels | None) -> TokensOf | None:
    """The labels as `pack.build_pack` takes them."""
    return labels.of if labels is not None else None
