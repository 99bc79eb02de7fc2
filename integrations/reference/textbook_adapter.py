"""One adapter trained alone, written out: a model whose weights hold the product, and the chain rule by hand.

    y = x (W + s B A)^T          dA = s B^T dW          dB = s dW A^T

(LoRA, Hu et al., arXiv 2106.09685, without dropout.) W, dW: [outputs, inputs] of a linear layer, s: its scaling. Plain
training of whole sequences gives dW, `textbook.AdamW` moves A and B. Nothing here knows of packs, hooks or other
tenants, so what trains many tenants together can be compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...core.plan.step_plan import Lengths
from ...core.recipe.adapter import Adapter
from ...runtime.attention.labels import Labels
from ...runtime.attention.pack import TokensOf
from .textbook import AdamW, norm_of


@dataclass
class Alone:
    """A tenant's own training on a trainer's `PlainModel`, which several tenants may use in turn."""

    plain: Any
    base: Mapping[str, Tensor]
    """Weights of the model without the adapter, as `Host.weights` gives them."""
    adapter: Adapter
    optimizer: AdamW
    """Of the matrices, by name as in `runtime.adapters.places.AdapterState`."""

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: state.weight for name, state in self.optimizer.states.items()}

    def merged(self) -> dict[str, tuple[float, Tensor, Tensor]]:
        """Make the plain model that of the tenant; scaling and matrices of each adapted layer."""
        weights = self.weights
        pairs = {
            name: (self.adapter.scaling_of(name), weights[f"{name}.lora_A"], weights[f"{name}.lora_B"])
            for name in sorted(key.removesuffix(".lora_A") for key in weights if key.endswith(".lora_A"))
        }
        self.plain.merge(self.base, {name: s * b @ a for name, (s, a, b) in pairs.items()})
        return pairs

    def gradients(
        self, tokens_of: TokensOf, lengths: Lengths, labels: Labels | None = None
    ) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradient of each matrix, float64, for a batch of the tenant's own. Collective."""
        pairs = self.merged()
        loss, of_parameters = self.plain.gradients(tokens_of, lengths, labels)
        of_linears = self.plain.of_linears(of_parameters)
        gradients = {}
        for name, (s, a, b) in pairs.items():
            of_linear = of_linears[name].double()
            gradients[f"{name}.lora_A"] = s * b.T @ of_linear
            gradients[f"{name}.lora_B"] = s * of_linear @ a.T
        return loss, gradients

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> float:
        """Clip by the adapter's own norm and update; the norm before clipping."""
        norm = norm_of(gradients)
        self.optimizer.step(gradients, norm, lr)
        return norm
