"""What the adapter of a tenant takes, from the sizes of the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..machine.shape import Shape
from .adapter import Adapter

STATE_BYTES = 16
"""Of a value of an adapter: the value, its gradient and Adam's two moments, in float32."""
DIVIDED_BYTES = 8
"""Of these the moments, which ranks that hold equal parts of the model divide between them."""


class Linear(NamedTuple):
    """A linear layer that can be adapted."""

    name: str
    """As Hugging Face's model of the family calls it."""
    inputs: int
    outputs: int


def linears_of(shape: Shape) -> Iterator[Linear]:
    """The linear layers of a dense model that can be adapted, layer by layer: all but the output layer.

    Gated blocks are called as llama's and qwen's are, others as those of gpt_neox.
    """
    hidden, ffn, query, kv = shape.hidden_size, shape.ffn_hidden_size, shape.query_size, shape.kv_size
    gated = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, ffn),
        "mlp.up_proj": (hidden, ffn),
        "mlp.down_proj": (ffn, hidden),
    }
    neox = {
        "attention.query_key_value": (hidden, query + 2 * kv),
        "attention.dense": (query, hidden),
        "mlp.dense_h_to_4h": (hidden, ffn),
        "mlp.dense_4h_to_h": (ffn, hidden),
    }
    above, of_layer = ("model", gated) if shape.gated else ("gpt_neox", neox)
    for layer in range(shape.num_layers):
        for name, sizes in of_layer.items():
            yield Linear(f"{above}.layers.{layer}.{name}", *sizes)


def adapter_weights(shape: Shape, adapter: Adapter) -> int:
    """Values of an adapter: r (in + out) of each linear layer that it adapts. A token multiplies all of them."""
    linears = list(linears_of(shape))
    targets = set(adapter.targets(linear.name for linear in linears))
    return sum(adapter.rank_of(one.name) * (one.inputs + one.outputs) for one in linears if one.name in targets)
