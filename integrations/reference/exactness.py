"""How far two sets of tensors are apart: what every proof of this package measures with.

    error(x) = ||x - reference|| / ||reference||        Euclidean norms in float64; ||x|| where the reference is zero

A value that is not a number, or not finite, makes the error infinite: no comparison may take it for a small one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Worst(NamedTuple):
    """The largest of several errors, and whose it is."""

    error: float = 0.0
    name: str = ""


def relative_error(value: Tensor, reference: Tensor) -> float:
    """The error of one tensor; infinite where either of the two has a value that is not finite."""
    value, reference = value.detach().double(), reference.detach().double()
    size = float(reference.norm())
    error = float((value - reference).norm()) / (size or 1.0)
    return error if math.isfinite(error) and math.isfinite(size) else math.inf


def largest_error(values: Mapping[str, Tensor], references: Mapping[str, Tensor]) -> Worst:
    """The worst of the tensors in ``values``; one without a reference counts as infinitely wrong."""
    errors = (
        Worst(relative_error(value, references[name]) if name in references else math.inf, name)
        for name, value in values.items()
    )
    return max(errors, default=Worst())


def not_finite(values: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold a NaN or an infinity."""
    return sorted(name for name, value in values.items() if not torch.isfinite(value).all())
