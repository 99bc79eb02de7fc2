"""Types that many modules write: arrays of numbers, and the ranks of a micro-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer[Any]]
Ranks = tuple[int, ...]
"""Places in the data and context parallel plane, in the order in which they share a sequence."""
