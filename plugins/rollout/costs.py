"""Seconds of decode steps on a rank:  step_s + row_s B + key_s K  for B live samples with K keys, prompts among them.

n steps of the same samples, each of which adds B keys, take  n (step_s + row_s B) + key_s (n K + B n (n - 1) / 2).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats


class RolloutCosts(NamedTuple):
    """Coefficients of a rank's decode steps, in seconds."""

    step_s: float
    """Of a step, however many samples are in it: weights are read, kernels launched."""
    row_s: float
    """Of each sample in it."""
    key_s: float
    """Of each key that it reads."""
    prompt_s: float = 0.0
    """Of each token of a prompt, and of keys that are computed again."""

    def steps_s(self, steps: int, rows: int, keys: int) -> float:
        """Seconds of decode steps of ``rows`` samples that hold ``keys`` before the first of them."""
        reads = steps * keys + rows * (steps * (steps - 1) / 2)
        return steps * (self.step_s + self.row_s * rows) + self.key_s * reads

    def work_s(self, prompts: Floats, tokens: Floats, squares: Floats) -> Floats:
        """Seconds of samples [N] but for their steps, by prompt, tokens and squared tokens, or means of these."""
        reads = prompts * tokens + (squares - tokens) / 2
        return np.asarray(self.row_s * tokens + self.key_s * reads + self.prompt_s * prompts)


H100_7B = RolloutCosts(step_s=6e-3, row_s=2e-5, key_s=1.7e-8)
"""A model of 7 billion weights with grouped queries in bf16 on an H100: bytes over 3.35 TB/s. Not measured."""
