"""What tenants add to the costs of a frozen base, from the sizes of their adapters.

An adapter of w values adds to a token 2 w FLOPs forward and twice that backward, where each product of matrices has
one for its input's gradient and one for its weight's. Seconds are taken from those of the base: as many as so many more
weights of the base take forward. On a rank it holds value, gradient and its part of Adam's moments; a step sums the
gradients of all tenants over the ranks that hold equal parts of the model, and gathers what each of these updated.

Adapters of low rank run below the rate of the base's larger products; that is left out here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ...core.costs.costs import BACKWARD_LINEAR, PassCost
from ...core.machine.shape import Shape
from ...core.planning.chain import PlanChain
from ...core.recipe.adapter import Adapter
from ...core.recipe.families import FAMILIES, families_with

STATE_BYTES = 16
"""Of a value of an adapter: the value, its gradient and Adam's two moments, in float32."""
DIVIDED_BYTES = 8
"""Of these the moments, which ranks that hold equal parts of the model divide between them."""
VALUE_BYTES = 4
"""Of a value of an adapter, and of its gradient."""


class TenantLoad(NamedTuple):
    """A tenant as far as costs go."""

    adapter: Adapter
    tokens: float
    """Of its samples in a step; of all tenants only the ratios count."""


def with_tenants(chain: PlanChain, shape: Shape, tenants: Iterable[TenantLoad]) -> PlanChain:
    """The chain of a frozen base whose adapters are these. The chain given must know none yet.

    A mean token has the mean adapter: which tenant is where changes no plan.
    """
    sizes = [(adapter_weights(shape, one.adapter), one.tokens) for one in tenants]
    weights, tokens = sum(size for size, _ in sizes), sum(count for _, count in sizes)
    if not weights or not tokens:
        return chain
    context, costs = chain.context, chain.context.costs
    share = sum(size * count for size, count in sizes) / tokens / shape.dense_weights
    forward = PassCost(token_s=share * costs.forward.token_s)
    passes = BACKWARD_LINEAR + costs.recompute
    layout = context.layout
    values = weights / (layout.tp * layout.pp)
    memory = costs.memory.model_copy(
        update={
            "fixed_bytes": costs.memory.fixed_bytes + STATE_BYTES * values,
            "sharded_bytes": costs.memory.sharded_bytes + DIVIDED_BYTES * values,
        }
    )
    changes = {
        "forward": costs.forward.plus(forward),
        "backward": costs.backward.plus(PassCost(token_s=0.0 if context.forward_only else passes * forward.token_s)),
        "memory": memory,
    }
    known = replace(
        context,
        costs=costs.model_copy(update=changes),
        traffic=replace(context.traffic, adapter_bytes=VALUE_BYTES * values),
        head_frac=context.head_frac / (1.0 + share),
    )
    return replace(chain, context=known, limits=replace(chain.limits, memory=memory))


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
