"""Whether others had a part of a machine while it was measured: its numbers are then too high, all or some."""

from __future__ import annotations

import logging
import os
from functools import cache

from pydantic import NonNegativeFloat

from ..input.bounds import RankCount
from ..input.validation import Frozen

logger = logging.getLogger("evenload")

MARGIN = 0.5
"""Processes beyond our own, or beyond the cores, that a quiet machine has: the system's."""
SPREAD = 1.25
"""Median over least seconds of a case's runs, in the median case, from which on somebody came in between."""


class OtherLoad(Frozen):
    """What ran on a machine while it was measured."""

    load: NonNegativeFloat
    """Processes that ran or wanted to, the mean of a minute (`load_average`)."""
    used: RankCount
    """Threads of our own ranks."""
    cores: RankCount
    spread: NonNegativeFloat
    """Median over least seconds of the runs of a case, the median case."""

    @property
    def busy(self) -> bool:
        """Whether more wanted to run than was ours or had a core, or runs of one case differed."""
        return self.load > max(self.used, self.cores) + MARGIN or self.spread > SPREAD

    def __str__(self) -> str:
        return f"load {self.load:.1f} on {self.cores} cores, {self.used} ours; runs {self.spread:.2f}x their least"


def load_average() -> float:
    """Processes that ran or wanted to, the mean of the last minute; 0 where the system does not say."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


@cache
def warn_of_busy(file: str, beside: OtherLoad) -> None:
    """Say once that a file's numbers are of a machine that was busy."""
    logger.warning("%s was measured on a busy machine (%s): what it predicts is too slow, all or some", file, beside)
