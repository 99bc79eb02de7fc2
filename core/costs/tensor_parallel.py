"""What one of several tensor-parallel ranks holds of the bytes of a stage.

Weights are divided but for those of norms and routers; activations (`core.costs.kept_values`) where a block works on
its part of the weights, so that norms and what they keep are whole on every rank. At 16 bits Korthikanti et al. (arXiv
2205.05198, section 4.2) have 10 of 34 bytes whole. Where ranks divide tokens between blocks, too (sequence
parallelism), norms and routers see a part; angles, and the rows that come to experts, are of all tokens even then.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..machine.shape import Shape
from .kept_values import kept_values, norm_values


def shares_of_rank(shape: Shape, value_bytes: int, tp: int, *, divides_tokens: bool) -> Mapping[str, float]:
    """By fields of a memory record the share of a rank, of those of which it has more than a ``tp``-th.

    Args:
        value_bytes: of a value in the passes.
        divides_tokens: ranks divide the tokens between blocks, too.
    """
    if tp == 1:
        return {}
    part = 1.0 / tp
    between, kept = part if divides_tokens else 1.0, kept_values(shape)
    layers = (kept.common * between + kept.angles + kept.rows + kept.divided * part) / sum(kept)
    last_norm, logits = norm_values(shape) * value_bytes, 4.0 * shape.vocab_size
    head = (last_norm * between + logits * part) / (last_norm + logits)
    weights = part + (1.0 - part) * shape.weights_on_all / shape.parameters
    of_layers = dict.fromkeys(("activation", "replay", "working"), layers)
    return {
        **{f"{name}_bytes_per_token": share for name, share in (of_layers | {"head": head}).items()},
        **dict.fromkeys(("fixed_bytes", "sharded_bytes", "gradient_bytes"), weights),
    }
