"""What plain training does with the gradients of a step, written out: clip by the global norm, then AdamW.

    g   <-  g min(1, c / (||g|| + 1e-6))                              c = train.clip_grad, 0: left as it is
    m   <-  b1 m + (1 - b1) g          v  <-  b2 v + (1 - b2) g^2     b1, b2 = train.betas
    w   <-  w - lr (weight_decay w) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

(Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, decay in front of the step as torch has it.) Vectors, that is
norms and biases, are not decayed. It knows no trainer, no rank and no shard: float64 tensors by name, so that a
trainer's own optimizer, sharded and mixed in precision, can be compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.recipe.sections import Updates

_MATRIX = 2


class AdamState(NamedTuple):
    """What an optimizer holds of one parameter, whole."""

    weight: Tensor
    """In the precision in which it is updated: float32 where the model runs in half precision."""
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass
class AdamW:
    """Clipping and AdamW on whole tensors; `states` holds float64 copies of the weights that it began with."""

    states: dict[str, AdamState]
    train: Updates
    num_steps: int = 0

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], train: Updates) -> AdamW:
        """At its start: both moments are zero. Weights on the CPU."""
        states = {}
        for name, weight in weights.items():
            copy = weight.detach().double().clone()
            states[name] = AdamState(copy, copy.new_zeros(copy.shape), copy.new_zeros(copy.shape))
        return cls(states, train)

    def step(self, gradients: Mapping[str, Tensor], norm: float, lr: float) -> None:
        """One update of the parameters that have gradients, the others are frozen; ``norm`` is that of all gradients,
        over the whole model."""
        self.num_steps += 1
        clip_grad, (beta1, beta2) = self.train.clip_grad, self.train.betas
        factor = min(1.0, clip_grad / (norm + 1e-6)) if clip_grad else 1.0
        correction1, correction2 = 1 - beta1**self.num_steps, 1 - beta2**self.num_steps
        for name, of_name in gradients.items():
            weight, exp_avg, exp_avg_sq = self.states[name]
            gradient = of_name.double() * factor
            exp_avg.mul_(beta1).add_(gradient, alpha=1 - beta1)
            exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            if weight.ndim >= _MATRIX:
                weight.mul_(1 - lr * self.train.weight_decay)
            weight.addcdiv_(exp_avg / correction1, (exp_avg_sq / correction2).sqrt().add_(self.train.eps), value=-lr)


def norm_of(gradients: Mapping[str, Tensor | None]) -> float:
    """The norm of all gradients together, in float64; None counts as zeros."""
    norms = [gradient.detach().double().norm() for gradient in gradients.values() if gradient is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0
