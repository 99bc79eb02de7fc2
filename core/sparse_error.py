"""What losses are off by whose attention left blocks of keys out, told by those that were computed both ways.

The interval is `core.corrected_mean`'s. It rests on errors that were drawn. An error above the limit in a share p of n
samples is among them, and has all computed again densely, with probability 1 - (1 - p)^n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .aliases import Floats, Ints
from .corrected_mean import corrected_mean


@dataclass(frozen=True)
class SparseError:
    """What a loss is off by that left blocks of keys out."""

    choose: str
    """By what blocks were chosen."""
    samples: int
    """That might leave blocks out."""
    drawn: int
    """Of these, scored densely as well."""
    kept: float
    """The mean share of their pairs of query and key that was computed."""
    worst: float
    """The largest relative error of a drawn sample's loss."""
    low: float | None = None
    """The 95 % interval of the loss; None: fewer than two samples are drawn, or losses are meant one by one."""
    high: float | None = None
    dense: bool = False
    """An error was above the limit, so the loss is that of a second pass, which was dense."""

    @property
    def text(self) -> str:
        """All of it in a line."""
        about = f"sparse by {self.choose}, {self.kept:.0%} of the pairs of {self.samples:,} samples"
        if self.dense:
            return f"{about}: off by {self.worst:.2g}, above sparse.limit, so scored again densely"
        within = "" if self.low is None else f"; 95 % in {self.low:.5g} to {self.high:.5g}"
        missed = f"an error in a tenth of them goes unseen with probability {0.9**self.drawn:.2g}"
        return f"{about}{within}; {self.drawn:,} scored densely as well are off by {self.worst:.2g} at most; {missed}"


class TwiceScored(NamedTuple):
    """Losses of samples that left blocks out, and some of them with all keys, too."""

    cheap: Floats
    """[N] sums of the token losses of each."""
    dense: Floats
    """[n] of those that were drawn."""
    places: Ints
    """[n] of these."""
    rest: float = 0.0
    """The losses of all other samples."""
    targets: int = 1
    """Of all."""

    def error(self, choose: str, limit: float, computed: Floats) -> SparseError | None:
        """What the mean loss of a target is off by; None where no sample left anything out.

        ``computed``: the share of its pairs that each did [N].
        """
        if not (computed < 1).any():
            return None
        off = np.abs(self.dense - self.cheap[self.places])
        worst = float((off / np.maximum(np.abs(self.dense), np.finfo(np.float64).tiny)).max(initial=0.0))
        low = high = None
        if len(self.dense) > 1 and np.isfinite(self.cheap).all() and np.isfinite(self.dense).all():
            mean = corrected_mean(self.cheap, self.dense, self.places)
            low, high = ((self.rest + len(self.cheap) * side) / self.targets for side in (mean.low, mean.high))
        kept, dense = float(computed.mean()), not worst <= limit
        return SparseError(choose, len(self.cheap), len(self.dense), kept, worst, low, high, dense)


def together(errors: Sequence[SparseError]) -> SparseError | None:
    """What losses of several passes are off by, without an interval of their mean; None of none."""
    if not errors:
        return None
    samples, num_drawn = (sum(getattr(one, name) for one in errors) for name in ("samples", "drawn"))
    kept = sum(one.kept * one.samples for one in errors) / samples
    worst, dense = max(one.worst for one in errors), any(one.dense for one in errors)
    return SparseError(errors[0].choose, samples, num_drawn, kept, worst, dense=dense)
