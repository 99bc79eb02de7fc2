"""What becomes of the scores of an attention before they are weights.

Shape legend: H = query heads.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ScoreForm(NamedTuple):
    """softmax(softcap * tanh(scale * q k^T / softcap)), one more score in it that is of no key."""

    scale: float
    """Usually D ** -0.5."""
    window: int | None = None
    """Tokens before its own that a query sees, also across the border of two slices; None: all."""
    dropout: float = 0.0
    """The probability with which a weight is set to 0, for samples that are neither cut nor shared."""
    softcap: float | None = None
    """What no score is beyond (Gemma 2, arXiv 2408.00118, section 2); None: scores are as they come."""
    sinks_H: Tensor | None = None
    """The score of no key, which takes weight from all keys (gpt-oss; StreamingLLM, arXiv 2309.17453); None: there is
    none."""

    @property
    def options(self) -> frozenset[str]:
        """What of this a kernel must be able to do."""
        wanted = {
            "window": self.window,
            "dropout": self.dropout or None,
            "softcap": self.softcap,
            "sinks": self.sinks_H,
        }
        return frozenset(name for name, value in wanted.items() if value is not None)
