"""Which answers a cascade of models accepts, and on how many devices each model runs (Cascadia, arXiv 2506.04203).

A sample comes to the first model; where an answer scores below its model's threshold, the sample goes on to the next.

    inner   devices f_k of models with given shares:    min L,   t_k(f_k) <= L,   sum f_k <= N
    outer   thresholds:    min max(w (L - L1) / (L2 - L1), (1 - w) (Q2 - Q) / (Q2 - Q1)),   Q >= floor

t_k: seconds of model k by devices under its share; L, Q: seconds of the slowest model and mean score; 1: of the first
model alone, 2: where all goes on to the last. The inner one is exact: bisection over the values of the tables,
O(K N log(K N)). The outer one (weighted Tchebycheff) is exact over thresholds that are scores of the samples, or
``most`` quantiles of them: candidates come by falling Q until that term alone loses. CPU time of 1,000 samples on 32
devices: two models 5 ms, three 0.5 s.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.errors import PlanError, refuse_first


class CascadePlan(NamedTuple):
    """Thresholds and devices of a cascade, and what they come to."""

    thresholds: tuple[float, ...]
    """Of each model but the last: answers that score below go on."""
    devices: tuple[int, ...]
    """Of each model; 0: nothing comes to it."""
    shares: tuple[float, ...]
    """Samples that come to each model, of all."""
    quality: float
    """Mean score of the answers that are accepted."""
    seconds: float
    """Of the slowest model; infinite where the models do not fit."""


def plan_cascade(
    scores: Floats,
    seconds: Floats | Callable[[int, float], Floats],
    num_devices: int,
    floor: float,
    *,
    weight: float = 1.0,
    most: int = 64,
    earlier: CascadePlan | None = None,
    slack: float = 0.1,
) -> CascadePlan:
    """Thresholds and devices for any server, from samples that every model has answered.

    Args:
        scores: of each model's answers [S, K], from cheap to dear.
        seconds: of each model on 1 .. N devices for all samples [K, N]; or a function from model and share to latencies
            [N]. Infinite where it does not fit.
        floor: least mean score.
        weight: of seconds against quality.
        most: thresholds of each model.
        earlier: stays while it keeps the floor and takes ``slack`` more at most.

    Raises EvenloadError for a floor that nothing keeps, PlanError where models do not fit.
    """
    scores = np.asarray(scores, np.float64)
    num = scores.shape[1] if scores.ndim == 2 and len(scores) else 0
    shape, do = getattr(seconds, "shape", (num, num_devices)), f"give [{num}, {num_devices}]"
    refuse_first(
        (
            not num or not np.isfinite(scores).all(),
            "scores are no numbers",
            f"{scores.shape}",
            "give [samples, models]",
        ),
        (num_devices < 1, "there is no device", str(num_devices), "give one or more"),
        (not 0 <= weight <= 1 or slack < 0, "weight or slack is none", f"{weight}, {slack}", "give shares"),
        (shape != (num, num_devices), "seconds are not of these models and devices", f"{shape}", do),
    )
    under = cache(seconds if callable(seconds) else lambda model, share: seconds[model] * share)

    def judged(thresholds: Sequence[float]) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
        """Quality turned round, the thresholds, and shares."""
        accepted, comes, shares = scores[:, -1].copy(), np.ones(len(scores), np.bool_), [1.0]
        for model, threshold in enumerate(thresholds):
            ends = comes & (scores[:, model] >= threshold)
            accepted[ends] = scores[ends, model]
            comes &= ~ends
            shares.append(float(comes.mean()))
        return -float(accepted.mean()), tuple(thresholds), tuple(shares)

    def plan(
        worse: float, thresholds: tuple[float, ...], shares: tuple[float, ...], on: Sequence[int] = ()
    ) -> CascadePlan:
        comes = [model for model, share in enumerate(shares) if share]
        tables = np.stack([under(model, shares[model]) for model in comes])
        devices, slowest_s = np.zeros(num, np.int64), np.inf
        if on:
            devices[:] = on
            slowest_s = max(row[on[m] - 1] if on[m] else np.inf for m, row in zip(comes, tables, strict=True))
        else:
            devices[comes], slowest_s = allot(tables, num_devices)
        return CascadePlan(thresholds, tuple(devices.tolist()), shares, -worse, float(slowest_s))

    one, all_on = (plan(*judged(ends)) for ends in (scores.min(0)[:-1].tolist(), [np.inf] * (num - 1)))
    scale_s, scale = _scale(all_on.seconds - one.seconds), _scale(all_on.quality - one.quality)
    candidates = sorted(map(judged, product(*(_thresholds(scores[:, model], most) for model in range(num - 1)))))
    detail, do = f"floor {floor:g}, best {-candidates[0][0]:g}", "lower the floor, or give a better model"
    refuse_first((not floor <= -candidates[0][0], "no thresholds keep the floor of quality", detail, do))
    best, least = None, (np.inf,) * 3
    for worse, thresholds, shares in candidates:
        loss = (1 - weight) * (all_on.quality + worse) / scale
        if loss > least[0] or -worse < floor:
            break
        least_s = max(float(under(model, share).min()) for model, share in enumerate(shares) if share)
        if weight * (least_s - one.seconds) / scale_s > least[0]:
            continue
        new = plan(worse, thresholds, shares)
        value = max(weight * (new.seconds - one.seconds) / scale_s, loss), new.seconds, worse
        if new.seconds < np.inf and value < least:
            best, least = new, value
    if best is None:
        raise PlanError("the models do not fit the devices", f"{num_devices} devices", "give more, or lower the floor")
    kept = plan(*judged(earlier.thresholds), earlier.devices) if earlier else best
    return kept if kept.quality >= floor and kept.seconds <= (1 + slack) * best.seconds else best


def allot(tables: Floats, num_devices: int) -> tuple[Ints, float]:
    """Devices of each model [K] by which the slowest has the fewest seconds, what is left for the next slowest; and
    these seconds, by those on 1 .. N devices [K, N]. No device and infinite seconds where the models do not fit."""
    within = np.minimum.accumulate(tables, axis=1)
    values = np.unique(within[np.isfinite(within)])

    def needed(limit_s: float) -> Ints:
        return np.asarray((within > limit_s).sum(axis=1) + 1)

    place = bisect_left(values, True, key=lambda limit_s: bool(needed(limit_s).sum() <= num_devices))
    if place == len(values):
        return np.zeros(len(tables), np.int64), np.inf
    devices = needed(values[place])
    if len(tables) > 1:
        slowest = int(within[np.arange(len(tables)), devices - 1].argmax())
        others = np.arange(len(tables)) != slowest
        devices[others] = allot(tables[others], num_devices - int(devices[slowest]))[0]
    return devices, float(values[place])


def _thresholds(scores: Floats, most: int) -> list[float]:
    """Scores at which a model's answers are accepted, from all of them to none."""
    values = np.unique(scores)
    if len(values) > most:
        values = np.unique(np.quantile(scores, np.linspace(0, 1, most), method="nearest"))
    return [*values.tolist(), np.inf]


def _scale(difference: float) -> float:
    return difference if 0 < difference < np.inf else 1.0
