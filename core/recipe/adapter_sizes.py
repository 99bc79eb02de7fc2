"""What the adapter of a tenant takes, from the sizes of the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..machine.shape import Shape
from .adapter import Adapter
from .families import FAMILIES, families_with

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

    They are called as in the first family that is gated as the model is: as llama's or as those of gpt_neox.
    """
    hidden, ffn, query, kv = shape.hidden_size, shape.ffn_hidden_size, shape.query_size, shape.kv_size
    modules = FAMILIES[families_with(lambda family: family.gated == shape.gated)[0]].modules
    sizes = {
        "qkv": (hidden, (query, kv, kv)),
        "attention_output": (query, (hidden,)),
        "ffn_in": (hidden, (ffn, ffn) if shape.gated else (ffn,)),
        "ffn_out": (ffn, (hidden,)),
    }
    for layer in range(shape.num_layers):
        for part, (inputs, outputs) in sizes.items():
            names = modules[part].replace("#", str(layer)).split()
            each = outputs if len(names) == len(outputs) else (sum(outputs),)
            yield from (Linear(name, inputs, size) for name, size in zip(names, each, strict=True))


def adapter_weights(shape: Shape, adapter: Adapter) -> int:
    """Values of an adapter: r (in + out) of each linear layer that it adapts. A token multiplies all of them."""
    linears = list(linears_of(shape))
    targets = set(adapter.targets(linear.name for linear in linears))
    return sum(adapter.rank_of(one.name) * (one.inputs + one.outputs) for one in linears if one.name in targets)
