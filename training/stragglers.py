"""A rank that holds all others up for another reason than its tokens, by name, and in what it is slow.

    compute    its passes take longer than the same predicted work does on the other ranks
    data       it reads its samples for longer than they do
    host       its thread waits longer than theirs for a core (Linux's run queue), for garbage or for its plan
    link       the time that even the rank which waits least is in none of these (exchanges, the update) has grown
               beyond the least of the run: no rank can be told from another there, as a collective holds all alike

Of the last `WINDOW` steps the median counts, so one slow step names nobody. What a rank loses is what it takes beyond
the lower median of the ranks, and counts from `SHARE` of a step on. Compute is not compared where passes hold the
waiting for other ranks (`Host.busy_waits`), nor with experts, whose work the routers decide.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from ..core.aliases import Floats
from ..runtime.attention.pack import TokensOf
from .garbage import PAUSES
from .job import VerbJob, logger
from .metrics import MeasuredStep

WINDOW = 20
SHARE = 0.1
_ADVICE = {
    "compute": "look at the clock and the temperature of its device, and at what else runs there",
    "data": "look at the disk that it reads from",
    "host": "look at what else takes the cores of its machine",
    "link": "look at the network",
}
_SCHEDULED = Path("/proc/thread-self/schedstat")


def queued_s() -> float:
    """Seconds in which this thread was ready and had no core, since it began; 0 where the system does not tell."""
    try:
        return int(_SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class OwnTime:
    """What this rank spends of a step besides its passes, from here on."""

    def __init__(self) -> None:
        self.data_s = 0.0
        self._since_s = queued_s() + PAUSES.seconds

    def reading(self, tokens_of: TokensOf) -> TokensOf:
        """What reads the same samples, and is timed."""

        def timed(index: int) -> Any:
            start_s = time.perf_counter()
            tokens = tokens_of(index)
            self.data_s += time.perf_counter() - start_s
            return tokens

        return timed

    def host_s(self) -> float:
        """Seconds without a core, and of garbage."""
        return queued_s() + PAUSES.seconds - self._since_s


class Stragglers:
    """Follows the steps of a run on the rank that reports."""

    def __init__(self, job: VerbJob, *, says: bool) -> None:
        self._job, self._says = job, says
        self._compares = not (job.host.busy_waits or job.has_experts)
        self._window: list[tuple[float, Floats, Floats]] = []
        self._least_s = np.inf
        self.rows: list[dict[str, Any]] = []
        """One of each window, rank and cause: first and last step, seconds and share of a step that were lost."""

    def note(self, step: int, taken: MeasuredStep, predicted_s: Floats) -> None:
        """Follow a step; ``predicted_s``: passes [stages, plane ranks]. Warns once of each rank and cause."""
        self._window.append((taken.step_s, taken.own_s, self._job.of_ranks(predicted_s)))
        if len(self._window) < WINDOW:
            return
        steps_s, own_s, predicted = (np.array([one[place] for one in self._window]) for place in (0, 1, 2))
        step_s, rest_s = float(np.median(steps_s)), least_rest_s(steps_s, own_s)
        lost_s: list[tuple[str, int | None, float]] = [*lost(own_s, predicted if self._compares else None)]
        if np.isfinite(self._least_s):
            lost_s.append(("link", None, rest_s - self._least_s))
        self._least_s = min(self._least_s, rest_s)
        for cause, rank, seconds in lost_s:
            if seconds > SHARE * step_s:
                self._name(step, cause, rank, seconds, seconds / step_s)
        self._window.clear()

    def _name(self, step: int, cause: str, rank: int | None, lost_s: float, share: float) -> None:
        known = any((row["cause"], row["rank"]) == (cause, rank) for row in self.rows)
        row = {"first_step": step + 1 - WINDOW, "last_step": step, "rank": rank, "cause": cause}
        self.rows.append({**row, "lost_s": lost_s, "share": share})
        if self._says and not known:
            who = "every rank" if rank is None else f"rank {rank}"
            text = "%s is slow in %s: it loses %.2g s of a step (%.0f %%) in steps %d to %d; %s"
            logger.warning(text, who, cause, lost_s, 100 * share, step + 1 - WINDOW, step, _ADVICE[cause])


def lost(own_s: Floats, predicted_s: Floats | None) -> list[tuple[str, int, float]]:
    """(cause, rank, seconds of a step) of what each rank loses compared with the others.

    Args:
        own_s: [steps, ranks, 3] seconds of passes, of reading, and of the host.
        predicted_s: [steps, ranks] of passes, in any unit; None: passes are not compared.
    """
    losses = []
    if predicted_s is not None and (predicted_s.sum(axis=0) > 0).all():
        scale = _lower_median(own_s[..., 0].sum(axis=0) / predicted_s.sum(axis=0))
        losses.append(("compute", own_s[..., 0] - scale * predicted_s))
    for place, cause in ((1, "data"), (2, "host")):
        losses.append((cause, own_s[..., place] - _lower_median(own_s[..., place].T)[:, None]))
    return [(cause, rank, float(s)) for cause, own in losses for rank, s in enumerate(np.median(own, axis=0))]


def least_rest_s(step_s: Floats, own_s: Floats) -> float:
    """What is left of a step to the rank that waits least, in seconds: [steps], [steps, ranks, 3] -> one number."""
    return float(np.median((step_s[:, None] - own_s.sum(axis=-1)).min(axis=1)))


def _lower_median(values: Floats) -> Any:
    """Over the first axis; of two the lesser, so that one of two ranks can be slow."""
    return np.sort(values, axis=0)[(len(values) - 1) // 2]
