"""Student's t with `NU` degrees of freedom, in numpy alone: density, survival, and the quantile that survival has.

With t = sqrt(nu) / tan(s) the tail beyond z is  a * integral of sin(s)^(nu - 1) over 0 <= s <= s(z),  and s = s(z) v^2
makes the integrand smooth at 0, so 24 Gauss nodes give 1e-13 of the value however far out z is.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from ...core.aliases import Floats

NU = 3.5
"""Degrees of freedom of log lengths (TIE, arXiv 2604.00499)."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_NODES, _WEIGHTS = (_NODES + 1) / 2, _WEIGHTS / 2
_FARTHEST = 1e8


def _scale(nu: float) -> float:
    return math.gamma((nu + 1) / 2) / (math.sqrt(math.pi) * math.gamma(nu / 2))


def density(z: Floats, nu: float = NU) -> Floats:
    """Probability density at z, float64 of any shape."""
    return np.asarray(_scale(nu) / math.sqrt(nu) * (1 + z * z / nu) ** (-(nu + 1) / 2))


def survival(z: Floats, nu: float = NU) -> Floats:
    """Probability of more than z, float64 of any shape, exact to 1e-13 of its value."""
    end = np.arctan2(math.sqrt(nu), np.abs(z))[..., None]
    inner = 2 * end * _NODES * np.sin(end * _NODES**2) ** (nu - 1)
    tail = _scale(nu) * (inner @ _WEIGHTS)
    return np.where(z >= 0, tail, 1 - tail)


@cache
def _table() -> tuple[Floats, Floats]:
    """log(survival), ascending, and asinh(z) there, for z from `_FARTHEST` down to 0."""
    rows = np.linspace(math.asinh(_FARTHEST), 0.0, 4096)
    return np.log(survival(np.sinh(rows))), rows


def exceeded_with(chance: Floats) -> Floats:
    """The z that is exceeded with a probability in (0, 1), to 1e-5; float64 of any shape."""
    logs, rows = _table()
    upper = np.minimum(chance, 1 - chance)
    z = np.sinh(np.interp(np.log(np.maximum(upper, 1e-300)), logs, rows))
    return np.where(chance <= 0.5, z, -z)
