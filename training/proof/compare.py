"""A step of a run next to the same step of plain training, and by how much it may differ.

    gradient   ||g - ref|| / ||ref|| of every parameter, fused projections by their parts
    weight     ||w - ref|| / ||ref - start||        what the updates moved, so that a missing one is an error of 1
    moment     ||m - ref|| / ||ref||                both of Adam's, in which clipping and the counting of steps show

Sums in another order round otherwise. A trainer's row bounds what that does in float64 and, mostly, in float32.
Where a gradient is a small difference of large terms it does more, and in bfloat16 it depends on the model altogether:
there plain training in the run's precision is held, on the same batch, against plain training in a higher one, and a
parameter of the run may be off by `OVER_FLOOR` times as much as that parameter is there (its floor).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...core.recipe.traits import trainer_called
from ...integrations.reference.exactness import Worst, not_finite, relative_error
from ...integrations.reference.textbook import AdamW

Tensors = Mapping[str, Tensor]

UPDATE = {"fp64": 1e-6, "fp32": 1e-4, "bf16": 1e-4}
"""Of a weight or a moment, by the precision of the run; both are updated in float32 in a run in bfloat16."""
OVER_FLOOR = 4.0
"""How many times as far as plain training in bfloat16 a planned run in bfloat16 may be off."""
_LOSS_BF16 = 1e-4
"""A relative error of a loss in bfloat16 that is never too much."""
_ROUNDING = {"fp64": torch.finfo(torch.float64).eps, "fp32": torch.finfo(torch.float32).eps}


@dataclass
class StepErrors:
    """What one step of one rank is off from plain training."""

    loss: float = 0.0
    gradient: Worst = field(default_factory=Worst)
    norm: float = 0.0
    weight: Worst = field(default_factory=Worst)
    moment: Worst = field(default_factory=Worst)
    not_finite: list[str] = field(default_factory=list)
    """Names of what holds a NaN or an infinity."""
    over: list[str] = field(default_factory=list)
    """In words, what is off by more than it may be."""


@dataclass(frozen=True)
class Tolerance:
    """How far a run of a precision may be off."""

    gradient: float
    loss: float
    update: float
    rounding: float
    floors: Mapping[str, float] = field(default_factory=dict)
    """Of each parameter the error of plain training in the run's own precision; empty where constants hold."""

    @classmethod
    def of(cls, trainer: str, dtype: str) -> Tolerance:
        """The constants of a precision; bfloat16 has none for gradients."""
        gradient = trainer_called(trainer).gradient_errors.get(dtype, 0.0)
        return cls(gradient, gradient or _LOSS_BF16, UPDATE[dtype], _ROUNDING["fp64" if dtype == "fp64" else "fp32"])

    def of_gradient(self, name: str) -> float:
        return max(self.gradient, OVER_FLOOR * self.floors.get(name, 0.0))

    def of_norm(self) -> float:
        """The norm of all gradients is off by no more than the worst of them."""
        return max(self.gradient, OVER_FLOOR * max(self.floors.values(), default=0.0))

    def measured(self, loss: float, gradients: Mapping[str, float]) -> Tolerance:
        """With floors: the errors of plain training in the run's own precision."""
        return replace(self, loss=max(self.loss, OVER_FLOOR * loss), floors=alike_in_all_layers(gradients))


def parts_of(plain: Any, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors as they are compared: fused projections by their parts."""
    return {part: piece for name, tensor in tensors.items() for part, piece in plain.parts(name, tensor)}


def alike_in_all_layers(errors: Mapping[str, float]) -> dict[str, float]:
    """For each parameter the largest of the errors that it and its like in other layers have: one alone may be small by
    chance."""
    kind_of = {name: re.sub(r"\.\d+\.", ".*.", name) for name in errors}
    worst: dict[str, float] = {}
    for name, kind in kind_of.items():
        worst[kind] = max(errors[name], worst.get(kind, 0.0))
    return {name: worst[kind] for name, kind in kind_of.items()}


def compare_gradients(errors: StepErrors, gradients: Tensors, references: Tensors, tolerance: Tolerance) -> None:
    """Fill the gradient's part of ``errors``; tensors by part. The worst is that which is furthest over its bound."""
    errors.not_finite += [f"gradient of {name}" for name in not_finite(gradients)]
    errors.over += [f"plain training has no gradient of {name}" for name in sorted(set(gradients) - set(references))]
    worst = (Worst(relative_error(g, references[name]), name) for name, g in gradients.items() if name in references)
    rows = [(one.error / (tolerance.of_gradient(one.name) or 1e-300), one) for one in worst]
    share, errors.gradient = max(rows, default=(0.0, Worst()))
    if not share <= 1.0:
        errors.over.append(f"gradient of {errors.gradient.name}: {errors.gradient.error:.2e}")


def compare_update(
    errors: StepErrors,
    weights: Tensors,
    states: Mapping[str, Any],
    plain: AdamW,
    start: Tensors,
    tolerance: Tolerance,
    frozen: Collection[str] = (),
) -> None:
    """Fill the part of weights and moments.

    Args:
        weights: that the forward of the next step will use.
        states: of the host's optimizer, of the parameters that this rank trains.
        plain: after the same step.
        start: weights before the first step.
        frozen: names of the weights that keep their values.
    """
    moments, moved = [Worst()], [Worst()]
    for name, state in states.items():
        wanted = plain.states[name]
        distance = wanted.weight - start[name].double()
        # A weight is stored with a relative error of half a unit in the last place, after each of the steps.
        rounding = tolerance.rounding * plain.num_steps * float(wanted.weight.norm())
        off = float((state.weight.double() - wanted.weight).norm()) - rounding
        moved.append(Worst(_share(off, float(distance.norm())), name))
        for key in ("exp_avg", "exp_avg_sq"):
            moments.append(Worst(relative_error(getattr(state, key), getattr(wanted, key)), f"{key} of {name}"))
        used, kept = weights[name].double(), state.weight.to(weights[name].dtype).double()
        if not torch.equal(used, kept):
            errors.over.append(f"the forward uses other weights of {name} than the optimizer holds")
    changed = sorted(name for name in frozen if not weights[name].equal(start[name]))
    errors.over += [f"weight {name} is frozen and has changed" for name in changed]
    errors.not_finite += [f"weight {name}" for name in not_finite({n: s.weight for n, s in states.items()})]
    errors.weight, errors.moment = max(moved), max(moments)
    for what, worst in (("weight", errors.weight), ("moment", errors.moment)):
        if not worst.error <= tolerance.update:
            errors.over.append(f"{what} {worst.name}: {worst.error:.2e}")


def compare_number(value: float, reference: float, least: float = 0.0) -> float:
    """Relative error of a loss or a norm, by no less than ``least``; infinite where one is not finite."""
    error = abs(value - reference) / (max(abs(reference), least) or 1.0)
    return error if math.isfinite(error) else math.inf


def _share(part: float, whole: float) -> float:
    """0 for a negative part; infinite where something is not finite."""
    share = part / (whole or 1.0)
    return max(0.0, share) if math.isfinite(share) else math.inf
