"""What the layers of a model keep of a token from forward to backward, counted from its sizes.

Values of layers that run operator by operator, each tensor once however many products and norms keep it:

    norms       input and output, which is the input of projections; of an RMSNorm one more      2 or 3 H, each of two
    rotary      cosine and sine, for queries and for keys                                        4 D
    attention   projections, rotated queries and keys, output, input of the last projection      4 Q + 3 K
    MLP         first product, activation; with a gate two more and a product                    2 F or 5 F
    router      scores, shares, probabilities by expert; some numbers of each choice             4 E
    experts     input, an MLP's values and one weighed by the router, of each choice             H + 3 F or 6 F

H hidden size, D head dimension, Q and K all heads' queries and keys, F inner size, E experts: the storages that
autograd saves in float32 on a CPU. Kernels that fuse norms or gates keep less.

Of several tensor-parallel ranks each has a part of the values where a block works on its part of the weights; norms and
what they keep are whole on every rank, and so are their weights and those of routers. At 16 bits Korthikanti et al.
(arXiv 2205.05198, section 4.2) have 10 of 34 bytes whole. Where ranks divide tokens between blocks, too (sequence
parallelism), norms and routers see a part; angles, and the rows that come to experts, are of all tokens even then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..machine.shape import Shape


class KeptValues(NamedTuple):
    """Values of a token in all layers, by what tensor-parallel ranks have of them."""

    common: int
    """Norms and routers."""
    angles: int
    rows: int
    """What comes to experts."""
    divided: int
    """What depends on a rank's part of the weights."""


def kept_values(shape: Shape) -> KeptValues:
    """What all layers of a model keep of a token."""
    layers, experts, inner = shape.num_layers, shape.experts, 5 if shape.gated else 2
    common = 2 * norm_values(shape) * layers
    mlp = (layers - shape.moe_layers) * shape.ffn_hidden_size
    rows = at_experts = 0
    if experts:
        common += 4 * experts.num_experts * shape.moe_layers
        mlp += shape.moe_layers * experts.shared_ffn_hidden_size
        rows = shape.routed_per_token * shape.hidden_size
        at_experts = shape.values_at_experts - rows
    attention = layers * (4 * shape.query_size + 3 * shape.kv_size)
    return KeptValues(common, 4 * layers * shape.head_size, rows, attention + inner * mlp + at_experts)


def norm_values(shape: Shape) -> int:
    """What one norm keeps, its output among it."""
    return (2 + shape.gated) * shape.hidden_size


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
