"""Which sequences of a global batch wait for a later one, because each alone would bound the step.

After WLB-LLM's outlier delay (arXiv 2503.17924; queues by length, one per threshold). Here one queue and no threshold
to tune. Let c_1 <= .. <= c_K be the costs of what was drawn and of what waits, R the number of ranks, and

    k = the largest index with  c_k <= (c_1 + .. + c_k) / R

Sequences 1 .. k run, and none of them costs more than a rank's mean share of the step: ranks can be even. The costlier
ones wait. As soon as about R of them cost alike, k covers them: they balance each other and run together. Where no k is
(few sequences a rank), those wait that cost more than the mean share of all. When the one that has waited longest is
due, all that wait run with it, since its step is long anyway.

Predicted on Wikipedia lengths (512 a step, 64 ranks, cost 24576 s + s^2, context 256K; benchmarks/planning/delay.py),
busiest ranks summed over ideal: 13.5 without delay, 11.4 / 9.9 / 8.4 / 7.0 with at most 1 / 2 / 4 / 8 steps, tokens
0.21 / 0.41 / 0.72 / 1.2 steps late on average. O(K log K); 0.1 ms for 600 sequences.

What it does not do: look ahead in the data, cut sequences, or change which samples are trained how often. It changes
in which step a sample is trained, hence the training run; WLB-LLM's own queues delay tokens by half a step on average.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...core.aliases import Floats, Ints
from ...core.registry import HoldBack
from .config import PackingConfig

Bools = npt.NDArray[np.bool_]

_ROUNDING = 1e-9
"""Relative slack of the comparison: R sequences of equal cost run whatever the last bit of their mean says."""


def hold_back(config: PackingConfig) -> HoldBack | None:
    """The rule that `StepPlugin.hold_back` asks for; None where ``max_delay_steps`` is 0."""
    if not config.max_delay_steps:
        return None

    return lambda lengths, waited, num_ranks, context: outliers(
        context.costs.sequence_s(lengths), waited, num_ranks, config.max_delay_steps
    )


def outliers(costs: Floats, waited: Ints, num_ranks: int, max_delay_steps: int) -> Bools:
    """Mask of the sequences that wait for a later step; never all of them.

    ``costs`` float64 [K], in any unit, of the sequences just drawn and of those that wait; ``waited`` int64 [K], steps
    that each has waited so far, 0 for those just drawn. One that has waited ``max_delay_steps`` is due.
    """
    nobody = np.zeros(len(costs), dtype=np.bool_)
    if (waited >= max_delay_steps).any():
        return nobody
    ascending = np.sort(costs)
    shares = np.cumsum(ascending) / num_ranks * (1 + _ROUNDING)
    even = np.flatnonzero(ascending <= shares)
    waits = costs > (ascending[even[-1]] if len(even) else shares[-1])
    return nobody if waits.all() else waits
