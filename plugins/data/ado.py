"""ADO: more of the domain whose loss falls fastest by its own scaling law (arXiv 2410.11820).

    L_i(n)  = e_i + b_i n^-a_i                      fitted to the losses of the run itself
    slope_i = a_i (L_i(n_i) - e_i) / n_i            = -dL_i / dn
    rho_i   ~ prior_i sqrt(h_i (1 - h_i)) slope_i   at least floor, over its sum
    pi      = (1 - s) mean + s rho                  mean <- (1 - 1/(t + 1)) mean + rho / (t + 1)

n_i: target tokens seen, of domain i or of all (``count``). h: running mean of what was drawn, the credit; its form, and
a_i of at least 0.05 in the slope, are those of the authors' published selector. t: steps. Until every domain has a fit
shares are those of the recipe.

The fit is ours: for each a of a grid, e and b >= 0 of least squares in closed form, and the a of the least residual
(the paper descends from a grid by a Huber loss of logarithms). Of losses a state holds at most `MOST_POINTS` a domain;
beyond, every second one goes, and from then on every second step is noted. O(K) a step, O(K grid points) a
fit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from ...core.aliases import Floats
from ...core.input.bounds import Beta, Count, CountOrNone
from ...core.input.validation import Frozen
from ...core.policies import DataPolicy, DomainsToMix, Proportions, SeenDomains, State, normalised
from .mixes import Share, mean_losses

MOST_POINTS = 256
_EXPONENTS = np.arange(1, 101) / 100
_LEAST_EXPONENT = 0.05


class Ado(Frozen):
    """Settings of Adaptive Data Optimization."""

    skip_steps: CountOrNone = 100
    """Whose losses no fit knows."""
    warmup_steps: Count = 200
    """Before the first fit."""
    every: Count = 100
    """Steps from fit to fit."""
    credit: Beta = 0.9
    """By how much h keeps to what it was."""
    smoothing: Annotated[float, Field(gt=0, le=1)] = 0.1
    """s"""
    floor: Share = 0.01
    """The least of rho, before it is over its sum."""
    count: Literal["all", "own"] = "all"
    """Target tokens that n is of: those of all domains, as in the authors' selector, or its own."""


def fitted(counts: Floats, losses: Floats) -> tuple[float, float, float]:
    """(e, b, a) of loss = e + b count^-a through points [P], e and b not below 0, a of a grid from 0.01 to 1."""
    first = counts[0]
    x = (counts / first) ** -_EXPONENTS[:, None]
    y = losses - losses.mean()
    centred = x - x.mean(axis=1, keepdims=True)
    slope = np.maximum(centred @ y / (centred**2).sum(axis=1), 0.0)
    rest = losses.mean() - slope * x.mean(axis=1)
    # What loss would be below 0 for ever is fitted without a rest.
    slope = np.where(rest < 0, np.maximum(x @ losses, 0.0) / (x**2).sum(axis=1), slope)
    rest = np.maximum(rest, 0.0)
    residual = ((rest[:, None] + slope[:, None] * x - losses) ** 2).sum(axis=1)
    best = int(residual.argmin())
    return float(rest[best]), float(slope[best] * first ** _EXPONENTS[best]), float(_EXPONENTS[best])


def _start(of: DomainsToMix, _: Ado) -> tuple[State, Proportions]:
    count, prior = len(of.shares), list(of.shares)
    points: list[list[list[float]]] = [[] for _ in range(count)]
    own = {"prior": prior, "credit": prior, "mean": prior, "counts": [0] * count}
    return {"step": 0, "stride": 1, "points": points, "fits": [None] * count, **own}, Proportions(of.shares)


def _step(state: State, seen: SeenDomains, settings: Ado) -> tuple[State, Proportions]:
    step, keep = state["step"] + 1, settings.credit
    counts = np.array(state["counts"]) + (seen.targets.sum() if settings.count == "all" else seen.targets)
    stride, points = _noted(state, seen, counts, settings)
    total = seen.samples.sum()
    credit = np.array(state["credit"])
    credit = keep * credit + (1 - keep) * seen.samples / total if total else credit
    fits = state["fits"]
    if step >= settings.warmup_steps and (step - settings.warmup_steps) % settings.every == 0:
        fits = [_fit(own) or before for own, before in zip(points, fits, strict=True)]
    prior, mean = np.array(state["prior"]), np.array(state["mean"])
    shares = prior
    if all(fits):
        wanted = _preferred(np.array(fits), counts, prior * np.sqrt(credit * (1 - credit)), settings.floor)
        shares = (1 - settings.smoothing) * mean + settings.smoothing * wanted
        mean = mean + (wanted - mean) / (step + 1)
    lists = {"credit": credit.tolist(), "mean": mean.tolist(), "counts": counts.tolist(), "points": points}
    new = {"step": step, "stride": stride, "fits": fits, "prior": state["prior"], **lists}
    return new, Proportions(tuple(shares.tolist()))


def _noted(state: State, seen: SeenDomains, counts: Any, settings: Ado) -> tuple[int, list[list[list[float]]]]:
    """Stride and points after a step."""
    stride, points = state["stride"], state["points"]
    if state["step"] < settings.skip_steps or state["step"] % stride:
        return stride, points
    losses = mean_losses(seen)
    points = [
        [*own, [int(count), float(loss)]] if there else own
        for own, count, loss, there in zip(points, counts, losses, seen.targets > 0, strict=True)
    ]
    if max(map(len, points)) > MOST_POINTS:
        return 2 * stride, [own[::2] for own in points]
    return stride, points


def _fit(points: list[list[float]]) -> tuple[float, float, float] | None:
    """The law of a domain; None where its points are too few for one."""
    if len({count for count, _ in points}) < 3:
        return None
    counts, losses = np.array(points, dtype=np.float64).T
    return fitted(counts, losses)


def _preferred(fits: Floats, counts: Any, weights: Floats, floor: float) -> Floats:
    """The shares rho [K] that the fits ask for."""
    _, scale, exponent = fits.T
    here = np.maximum(counts, 1).astype(np.float64)
    slope = np.maximum(exponent, _LEAST_EXPONENT) * scale * here**-exponent / here
    wanted = weights * slope
    if not wanted.any():  # no loss falls any more
        wanted = weights
    return np.array(normalised(np.maximum(normalised(wanted), floor)))


ADO = DataPolicy(_start, _step, Ado)
