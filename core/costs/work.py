"""What a model must compute for a step, whatever runs it: the numerator of MFU.

    forward   2 W n + 4 L Q n^2 / 2          backward   twice the forward

of a sequence of n tokens, W weights that a token multiplies (those of the experts to which it is routed among them, the
embedding not), L layers, Q values of the queries of a layer. A pair of a query and a key counts where the mask lets
them meet: half of what Chowdhery et al. (arXiv 2204.02311, appendix B) count for attention. What runs twice
(recomputation, replays), padding and dummies count nothing, and frozen weights count as if they were trained.
"""

from __future__ import annotations

import numpy as np

from ..aliases import Ints
from ..machine.shape import Shape

BACKWARD = 2.0


def step_flops(shape: Shape, lengths: Ints) -> float:
    """FLOPs of forward and backward over whole sequences of ``lengths`` [S]."""
    n = np.asarray(lengths, dtype=np.float64)
    forward = 2.0 * shape.weights * n.sum() + 2.0 * shape.num_layers * shape.query_size * np.square(n).sum()
    return float((1.0 + BACKWARD) * forward)
