"""What one of several tensor-parallel ranks holds of the bytes of a stage.

Weights are divided but for those of norms and routers, activations where a block works on its part of the weights. Of a
token each layer of Megatron-Core's local spec keeps for its backward [values]:

    norms       input and output, which is the input of projections; of an RMSNorm one more      2 or 3 H, each of two
    rotary      cosine and sine, for queries and for keys                                        4 D
    attention   projections, rotated queries and keys, output, input of the last projection      4 Q + 3 K     divided
    MLP         first product (and its gate), activation (and their product)                     2 F or 5 F    divided
    experts     tokens as they come and go; first product ... of each expert that has a part     2 H + 3 or 5 F

H hidden size, D head dimension, Q and K all heads' queries and keys, F inner size: counted from the storages that
autograd saves on a CPU. At 16 bits Korthikanti et al. (arXiv 2205.05198, section 4.2) have 10 of 34 bytes whole. Norms
and routers see a rank's part of the tokens where tensor-parallel ranks divide those, too (sequence parallelism); angles
and the rows of experts are those of all tokens even then.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..machine.shape import Shape


def shares_of_rank(shape: Shape, value_bytes: int, tp: int, *, divides_tokens: bool) -> Mapping[str, float]:
    """By fields of a memory record the share of a rank, of those of which it has more than a ``tp``-th.

    Args:
        value_bytes: of a value in the passes.
        divides_tokens: ranks divide the tokens between blocks, too.
    """
    if tp == 1:
        return {}
    part = 1.0 / tp
    between = part if divides_tokens else 1.0
    norm = (2 + shape.gated) * shape.hidden_size
    angles, rows = float(4 * shape.num_layers * shape.head_size), float(2 * shape.hidden_size * shape.routed_per_token)
    common = 2.0 * norm * shape.num_layers + shape.values_of_routers
    layers = _share(common * between + angles + rows, common + angles + rows, _divided(shape), part)
    head = _share(norm * value_bytes * between, norm * value_bytes, 4.0 * shape.vocab_size, part)
    weights = part + (1.0 - part) * shape.weights_on_all / shape.parameters
    of_layers = dict.fromkeys(("activation", "replay", "working"), layers)
    return {
        **{f"{name}_bytes_per_token": share for name, share in (of_layers | {"head": head}).items()},
        **dict.fromkeys(("fixed_bytes", "sharded_bytes", "gradient_bytes"), weights),
    }


def _share(held: float, whole: float, divided: float, part: float) -> float:
    return (held + part * divided) / (whole + divided)


def _divided(shape: Shape) -> float:
    """Values of a token that depend on a rank's part of the weights, in all layers."""
    inner = 5 if shape.gated else 2
    dense = (shape.num_layers - shape.moe_layers) * inner * shape.ffn_hidden_size
    values = shape.num_layers * (4 * shape.query_size + 3 * shape.kv_size) + dense
    if shape.experts:
        routed = (5 if shape.gated else 3) * shape.experts.ffn_hidden_size * shape.routed_per_token
        values += routed + shape.moe_layers * inner * shape.experts.shared_ffn_hidden_size
    return float(values)
