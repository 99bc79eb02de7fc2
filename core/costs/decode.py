"""What a decode step of a rank takes, as `evenload profile` measures it."""

from __future__ import annotations

import numpy as np
from pydantic import NonNegativeFloat

from ..aliases import Floats, Ints
from ..errors import refuse_first
from ..input.validation import Frozen


class DecodeCost(Frozen):
    """Seconds of a step of B samples with K keys, prompts among them: step_s + row_s B + key_s K. Of a rank, or of
    tensor-parallel ranks together, at the degree that was measured."""

    step_s: NonNegativeFloat
    row_s: NonNegativeFloat
    key_s: NonNegativeFloat
    prompt_s: NonNegativeFloat
    """Of a token of a prompt, and of keys that are computed again."""
    fit_error: float | None = None
    """Mean absolute relative error over the steps that were measured."""


def fit_decode(rows: Ints, keys: Ints, seconds: Floats) -> DecodeCost:
    """Costs of measured steps [N], prompts aside: least squares of relative errors, none negative. Raises
    EvenloadError."""
    columns = np.stack([np.ones(len(rows)), np.asarray(rows, np.float64), np.asarray(keys, np.float64)], axis=1)
    odd = len(seconds) < 3 or not (np.asarray(seconds) > 0).all() or np.linalg.matrix_rank(columns) < 3
    do = "measure three steps or more, with unlike numbers of samples and of keys"
    refuse_first((odd, "steps do not say what a sample and a key cost", f"{len(seconds)} steps", do))
    system = columns / np.asarray(seconds)[:, None]
    active, x = [0, 1, 2], np.zeros(3)
    while active:
        part, *_ = np.linalg.lstsq(system[:, active], np.ones(len(rows)), rcond=None)
        if (part >= 0).all():
            x[active] = part
            break
        active.remove(active[int(part.argmin())])
    step_s, row_s, key_s = x.tolist()
    return DecodeCost(step_s=step_s, row_s=row_s, key_s=key_s, prompt_s=0.0)
