"""What a decode step of a rank takes, as `evenload profile` measures it."""

from __future__ import annotations

from pydantic import NonNegativeFloat

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
