"""A tenant by itself, written for the proof: plain training on whole sequences in float64, with W + s B A for W.

The chain rule gives what the adapter gets: dA = s B^T dW, dB = s dW A^T. Float64, because a float32 reference would add
rounding of its own to that of the run; norms stay in float32 there, as Transformers has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from evenload.core.plan.step_plan import StepPlan
from evenload.core.recipe.adapter import Adapter
from evenload.core.recipe.tenant import TenantTrain
from evenload.integrations.deepspeed.engine.model import build_model
from evenload.integrations.deepspeed.plain import plain_gradients
from evenload.runtime.adapters.places import AdapterState
from evenload.runtime.attention.labels import Labels, part_of

Tensors = dict[str, torch.Tensor]


def adapters_of(family: str, layers: int) -> tuple[Adapter, ...]:
    """Of three tenants, the second of which adapts the last layer alone.

    What they add to the base is as small as its weights: sharper attention would have float32 round more.
    """
    some, one = ("self_attn.v_proj", "mlp.down_proj"), "o_proj"
    if family == "gpt":
        some, one = ("attention.query_key_value", "mlp.dense_4h_to_h"), "attention.dense"
    last = Adapter(r=8, target_modules=tuple(f"{layers - 1}.{name}" for name in some))
    return Adapter(r=4, lora_alpha=8), last, Adapter(r=16, lora_alpha=8, rank_pattern={one: 5}, use_rslora=True)


TRAIN = TenantTrain(weight_decay=0.1, clip_grad=0.5)
RATES = {0: 5e-4, 1: 2e-4, 2: 1e-4}


def drawn_states(adapters: Sequence[Adapter], weights: Mapping[str, torch.Tensor]) -> list[AdapterState]:
    """An adapter of each tenant whose B is not zero, the same on every rank; ``weights``: of the base."""
    generator = torch.Generator().manual_seed(1)
    linears = [n.removesuffix(".weight") for n, w in weights.items() if ".layers." in n and w.ndim == 2]
    states = []
    for adapter in adapters:
        matrices = {}
        for name in adapter.targets(linears):
            outputs, inputs = weights[f"{name}.weight"].shape
            rank = adapter.rank_of(name)
            matrices[f"{name}.lora_A"] = torch.randn(rank, inputs, generator=generator) * 0.03
            matrices[f"{name}.lora_B"] = torch.randn(outputs, rank, generator=generator) * 0.03
        states.append(AdapterState(matrices, {}, {}, 0))
    return states


class Alone:
    """A tenant, alone with the base; ``number``: of the tenant in plans."""

    def __init__(
        self, recipe: Any, base: Mapping[str, torch.Tensor], number: int, adapter: Adapter, state: AdapterState
    ) -> None:
        self.number, self.adapter = number, adapter
        self._base = {name: weight.double() for name, weight in base.items()}
        self._model = build_model(recipe, attn_implementation="sdpa").double()
        self.matrices = {name: torch.nn.Parameter(value.double()) for name, value in state.weights.items()}
        self._optimizer = torch.optim.AdamW(
            self.matrices.values(), lr=0.0, betas=TRAIN.betas, eps=TRAIN.eps, weight_decay=TRAIN.weight_decay
        )

    def gradients(self, plan: StepPlan, tokens_of: Any, labels: Labels | None = None) -> tuple[float, Tensors]:
        """Loss and gradients of the tenant's own sequences of a plan."""
        self._merge()
        ids = np.flatnonzero(plan.tenants == self.number)
        own = plan.lengths[ids], part_of(labels, ids.tolist())
        loss, of_weights = plain_gradients(self._model, lambda i: tokens_of(ids[i]), *own)
        gradients = {}
        for name in self._layers():
            weight, scaling = f"{name}.weight", self.adapter.scaling_of(name)
            of_weight = of_weights[weight] if weight in of_weights else torch.zeros_like(self._base[weight])
            a, b = (self.matrices[f"{name}.lora_{kind}"].detach() for kind in "AB")
            gradients[f"{name}.lora_A"] = scaling * b.T @ of_weight
            gradients[f"{name}.lora_B"] = scaling * of_weight @ a.T
        return loss, gradients

    def step(self, plan: StepPlan, tokens_of: Any, labels: Labels | None = None) -> tuple[float, float]:
        """One clipped update: its loss, and the norm before clipping."""
        loss, gradients = self.gradients(plan, tokens_of, labels)
        for name, matrix in self.matrices.items():
            matrix.grad = gradients[name]
        norm = float(torch.nn.utils.clip_grad_norm_(self.matrices.values(), TRAIN.clip_grad))
        self._optimizer.param_groups[0]["lr"] = RATES[self.number]
        self._optimizer.step()
        return loss, norm

    @torch.no_grad()
    def logits(self, tokens: Any) -> torch.Tensor:
        """Of a whole sequence [L, V]."""
        self._merge()
        logits: torch.Tensor = self._model(input_ids=torch.as_tensor(tokens)[None].long(), use_cache=False).logits[0]
        return logits

    @torch.no_grad()
    def _merge(self) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.copy_(self._base[name])
            if (layer := name.removesuffix(".weight")) in self._layers():
                a, b = (self.matrices[f"{layer}.lora_{kind}"] for kind in "AB")
                parameter.add_(b @ a, alpha=self.adapter.scaling_of(layer))

    def _layers(self) -> list[str]:
        return list(dict.fromkeys(name.removesuffix(".lora_A").removesuffix(".lora_B") for name in self.matrices))
