"""The sequences of a step by their tenants, those that other replicas compute among them.

A tenant's loss is divided by all of its targets, and its dropout goes by the place of a sample among all of its own:
neither depends on who computes what.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...core.aliases import Ints
from ...core.plan.step_plan import Lengths
from ..attention.labels import Labels, TargetWeights
from ..world.agreement import everyone


class Divided(NamedTuple):
    """By what a tenant's losses are divided."""

    num_targets: int
    divisor: float
    """As many, or what their weights add up to, or as given."""


class Company(NamedTuple):
    """See the module; N: sequences of the step, on all replicas."""

    tenants: Ints
    """Number of each sequence's tenant [N]."""
    targets: npt.NDArray[np.int64]
    """Of each sequence [N]."""
    weights: TargetWeights | None
    """Of all N; None: each is 1."""
    places: Ints
    """Of the plan's sequences among them."""
    counts: bool = True
    """Whether the plan's sequences are its replica's to train; else they are copies, and have no targets here."""

    @classmethod
    def of(cls, tenants: Ints, lengths: Lengths, labels: Labels | None) -> Company:
        """All sequences of a step, in the order of a plan of them all."""
        targets = np.maximum(lengths - 1, 0) if labels is None else labels.targets
        return cls(tenants, targets, labels and labels.weights, np.arange(len(lengths)))

    @property
    def divisors(self) -> dict[int, Divided]:
        """What the losses of each tenant are divided by. Raises EvenloadError for a given divisor that is not finite
        and above 0."""
        weights, divided = self.weights, dict[int, Divided]()
        for tenant in np.unique(self.tenants).tolist():
            own = self.tenants == tenant
            count = int(self.targets[own].sum())
            divided[tenant] = Divided(count, weights.divisor_of(own, tenant) if weights else float(count))
        return divided

    def gathered(self, own: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, Any]:
        """Values of the plan's sequences, the same on every rank of a replica, as those of all N. Collective."""
        whole = {key: np.zeros((len(self.tenants), *values.shape[1:]), values.dtype) for key, values in own.items()}
        for places, values in everyone((self.places if self.counts else self.places[:0], own), "job"):
            for key in whole:
                whole[key][places] = values[key][: len(places)]
        return whole
