"""Types that many modules write: arrays of numbers, and the ranks of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer[Any]]
Divisor = float | Mapping[int, float] | None
"""What is given to divide a weighted loss by, in place of what the weights add up to; of tenants by their numbers."""
Ranks = tuple[int, ...]
"""Places in the data and context parallel plane, in the order in which they share a sequence."""
