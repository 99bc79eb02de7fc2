"""Which tokens of a global batch carry loss, with what weight, and the one divisor of every token loss.

    L = sum over targets of w l / D         l the loss of a target, w its weight; D: sum over targets of w, or as given

A prompt, padding or whatever else a model is not to learn carries no loss, but is attended to. A label stands at the
place of its token: the token before it predicts it, also across the border of two slices; so does its weight. Weights
may have any sign. A token whose weight is 0 is no target. Without weights each is 1, and L the mean loss of a target.
Weights that add up to 0, as centred advantages of policy gradients do, need a divisor that is given. D is one number of
the global batch, or of a tenant's part of it, whatever the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...core.aliases import Divisor, Floats, Ints
from ...core.errors import EvenloadError
from ...core.plan.step_plan import Lengths
from .pack import IGNORE, TokensOf

WeightsOf = Callable[[int], Floats]
"""Weights, or other numbers, float64 [length] of the tokens of a sequence as targets, by its place in the global batch;
what stands at the first token, and where there is no target, does not count."""
NOBODY = -1
"""The tenant of sequences that are no tenant's."""


class TargetWeights(NamedTuple):
    """The weights of the targets of a global batch. In place of it, None says that each is 1."""

    of: WeightsOf
    sums: Floats
    """Sum of the weights of each sequence's targets, float64 [N], the same on every rank."""
    divisor: Divisor = None
    """What the sum of weighted losses is divided by, above 0, the same on every rank; None: by what the weights add up
    to. Of tenants by their numbers, where one that is left out has None."""

    def set_divisor(self, tenant: int = NOBODY) -> float | None:
        """The divisor of a batch, or of a tenant's part of it, where it is given."""
        return self.divisor.get(tenant) if isinstance(self.divisor, Mapping) else self.divisor

    def divisor_of(self, places: Any = slice(None), tenant: int = NOBODY) -> float:
        """The divisor of all sequences, or of a tenant's, whose places these are. Raises EvenloadError for a given one
        that is not finite and above 0."""
        divisor = self.set_divisor(tenant)
        if divisor is None:
            return float(self.sums[places].sum())
        if not 0 < divisor < math.inf:
            do = "give TargetWeights.divisor a finite number above 0, or None"
            raise EvenloadError("the divisor of a weighted loss is not a number above 0", f"{divisor}", do)
        return float(divisor)


class Labels(NamedTuple):
    """The targets of a global batch. In place of Labels, None says that each token but a sequence's first is one."""

    of: TokensOf
    """int64 [length] of a sequence by its place in the global batch: what each token counts as where it is a target,
    `pack.IGNORE` where it carries no loss. The first token is never a target, whatever stands there."""
    targets: npt.NDArray[np.int64]
    """Number of targets of each sequence [N]."""
    weights: TargetWeights | None = None
    reference: WeightsOf | None = None
    """Losses float64 [length] of the tokens of a sequence as targets by another model, which a step's are compared
    with; None: with nothing."""


def count_targets(lengths: Lengths, labels: Labels | None = None) -> int:
    """Target tokens of a global batch."""
    return int(np.maximum(lengths - 1, 0).sum() if labels is None else labels.targets.sum())


def loss_divisor(lengths: Lengths, labels: Labels | None = None) -> float:
    """The one divisor of every token loss, on every rank and in every micro-batch: how many targets a global batch has,
    or what their weights add up to, or what is given in place of it."""
    if labels is None or labels.weights is None:
        return float(count_targets(lengths, labels))
    return labels.weights.divisor_of()


def checked_divisor(lengths: Lengths, labels: Labels | None) -> float:
    """`loss_divisor`. Raises EvenloadError, on all ranks alike, where weights add up to nothing to divide by."""
    divisor = loss_divisor(lengths, labels)
    weights = labels and labels.weights
    total = float(weights.sums.sum()) if weights else 1.0
    if not math.isfinite(total) or (weights and not divisor):
        raise EvenloadError(
            "the weights of a global batch add up to nothing that its loss can be divided by",
            f"sum {total:g} over {count_targets(lengths, labels)} targets of {len(lengths)} sequences",
            "give weights whose sum over a global batch is finite and not 0, or set data.weight_divisor",
        )
    return divisor


def readers_of(labels: Labels | None) -> dict[str, Any]:
    """The labels and their weights as `pack.build_pack` takes them."""
    if labels is None:
        return {}
    return {"labels_of": labels.of, "weights_of": None if labels.weights is None else labels.weights.of}


def part_of(labels: Labels | None, places: Sequence[int], tenant: int = NOBODY) -> Labels | None:
    """The labels of some sequences of a batch, as a batch of their own; ``tenant``: whose all of them are."""
    if labels is None:
        return None
    own = Labels(lambda index: labels.of(places[index]), labels.targets[places])
    if (weights := labels.weights) is None:
        return own
    parts = weights.sums[places], weights.set_divisor(tenant)
    return own._replace(weights=TargetWeights(lambda index: weights.of(places[index]), *parts))


def weighed(
    labels: Labels | None,
    tokens_of: TokensOf,
    lengths: Ints,
    weights_of: WeightsOf,
    divisor: Divisor = None,
) -> Labels:
    """The labels of a batch with these weights, those of weight 0 left out, and `TargetWeights.divisor`. Reads the
    labels of all sequences."""
    known = tokens_of if labels is None else labels.of

    def of(index: int) -> npt.NDArray[np.int64]:
        return np.where(weights_of(index) != 0, known(index)[: lengths[index]], IGNORE).astype(np.int64)

    targets = [of(index)[1:] != IGNORE for index in range(len(lengths))]
    sums = [float(weights_of(index)[1:][target].sum()) for index, target in enumerate(targets)]
    counts = np.array([np.count_nonzero(target) for target in targets], dtype=np.int64)
    return Labels(of, counts, TargetWeights(weights_of, np.array(sums), divisor))
