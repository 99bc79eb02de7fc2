"""How a batch is divided into rounds, in each of which all ranks run one micro-batch.

    minimise  sum_m C_m + (P - 1) max_m C_m + (M + P - 1) * launch_s      with  sum_{k in round m} tokens_k <= N * cap

``C_m`` is the time of round m if its sequences level (`place.target_of`), P the pipeline stages, M the rounds. Every
round gets the like of every other one, since short sequences fill what long ones leave; but the first may be longer,
by some shares of the mean, and then has all sequences that would need more than a node in the others: in a long round
few ranks suffice for them, and what they send stays inside nodes. FlexSP (arXiv 2412.01523, section 4.2) cuts the batch
in the order of length into runs of equal tokens: that levels badly where long ones meet, and was never better here.

O(K (D + M)) for each division.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....core.aliases import Floats, Ints
from ..assign import Frame, target_of
from ..cost_table import SequenceCosts

_ONE_BY_ONE, _DEALT = 256, 512
"""The longest sequences are dealt to rounds one by one, the others in so many runs of neighbours in length."""
_TILTS = tuple(1.0 + 0.075 * k for k in range(13))
"""Time of the first round over the mean."""


class Division(NamedTuple):
    """A batch divided into rounds."""

    rounds: list[Ints]
    """Numbers of sequences."""
    seconds: float
    """Of a step, estimated."""


def fewest_rounds(lengths: Ints, frame: Frame) -> int:
    """Rounds that hold all tokens."""
    return max(1, -(-int(lengths.sum()) // int(frame.num_ranks * frame.cap)))


def step_seconds(rounds: list[float], launch_s: float, stages: int) -> float:
    """Seconds of a step of these rounds, without hand-overs."""
    return sum(rounds) + (stages - 1) * max(rounds) + (len(rounds) + stages - 1) * launch_s


def divisions(lengths: Ints, shares: SequenceCosts, frame: Frame, launch_s: float, stages: int) -> list[Division]:
    """Divisions of the batch, those of least estimated time first. lengths int64 [K]."""
    least = fewest_rounds(lengths, frame)
    total_s = float(shares.least_area.sum()) / frame.num_ranks
    candidates: list[Division] = []
    for count in _counts(least, total_s, launch_s, stages, len(lengths)):
        candidates += _mixed(lengths, shares, frame, count, launch_s, stages)
    return sorted(candidates, key=lambda one: one.seconds)


def _counts(least: int, total_s: float, launch_s: float, stages: int, most: int) -> list[int]:
    """Numbers of rounds: the fewest and one more; with stages about what balances their idling with launches."""
    tried = {least, least + 1}
    if stages > 1 and launch_s > 0:
        # The least of  total_s (P - 1) / M + launch_s M.
        best = np.sqrt(total_s * (stages - 1) / launch_s)
        tried |= {round(best * factor) for factor in (0.35, 0.5, 0.7, 1.0, 1.4)}
    elif stages > 1:
        tried |= {least * factor for factor in (2, 4, 8, 16)}
    return sorted(count for count in tried if least <= count <= most) or [least]


def _mixed(
    lengths: Ints, shares: SequenceCosts, frame: Frame, count: int, launch_s: float, stages: int
) -> Iterator[Division]:
    """Rounds that are alike but for their size: the first takes longer, and has all sequences that would need more
    than a node in the others."""
    if count == 1:
        every = np.arange(len(lengths))
        yield Division([every], step_seconds([target_of(shares, every, frame.num_ranks, 1.0)], launch_s, stages))
        return
    area = shares.least_area
    in_node = shares.seconds[:, shares.degrees <= frame.node].min(axis=1)
    total_s = float(area.sum()) / frame.num_ranks
    known: set[bytes] = set()
    for first_round_scale in _TILTS if stages == 1 else _TILTS[:1]:
        first_s = total_s * first_round_scale / count
        other_s = (total_s - first_s) / (count - 1)
        if other_s <= 0:
            break
        tied = in_node > other_s if first_round_scale > 1 else np.zeros(len(lengths), dtype=bool)
        capacity = np.full((2, count), other_s * frame.num_ranks)
        capacity[0, 0], capacity[1] = first_s * frame.num_ranks, frame.num_ranks * frame.cap
        base = np.zeros((2, count))
        base[:, 0] = area[tied].sum(), lengths[tied].sum()
        bins = _dealt(np.array([area, lengths]), tied, capacity, base)
        held = np.bincount(bins, lengths, count)
        if held.max() > frame.num_ranks * frame.cap or bins.tobytes() in known:
            continue
        known.add(bins.tobytes())
        rounds: list[Ints] = [np.flatnonzero(bins == b) for b in np.unique(bins).tolist()]
        times = [target_of(shares, r, frame.num_ranks, 1.0) for r in rounds]
        yield Division(rounds, step_seconds(times, launch_s, stages))


def _dealt(weights: Floats, tied: npt.NDArray[np.bool_], capacity: Floats, base: Floats) -> Ints:
    """A round for each sequence: largest first to the one that is least full; tied ones stay in the first."""
    bins = np.zeros(weights.shape[1], dtype=np.int64)
    free = np.flatnonzero(~tied)
    free = free[np.argsort(-weights[0, free], kind="stable")]
    ends = np.unique(
        np.append(
            np.minimum(np.arange(1, _ONE_BY_ONE + 1), len(free)), np.linspace(0, len(free), _DEALT).astype(np.int64)
        )
    )
    parts = np.diff(np.cumsum(np.pad(weights[:, free], ((0, 0), (1, 0))), axis=1)[:, ends]).T.tolist()
    seconds, tokens = base.tolist()
    most_s, most = capacity.tolist()
    fill = [max(s / a, t / b) for s, t, a, b in zip(seconds, tokens, most_s, most, strict=True)]
    chosen = []
    for more_s, more in parts:
        b = fill.index(min(fill))
        chosen.append(b)
        seconds[b] += more_s
        tokens[b] += more
        fill[b] = max(seconds[b] / most_s[b], tokens[b] / most[b])
    bins[free] = np.repeat(chosen, np.diff(ends))
    return bins
