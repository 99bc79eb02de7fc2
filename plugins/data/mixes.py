"""Mixes of closed form: shares by size, by a bandit, by excess loss.

    temperature   pi_i ~ n_i^(1/tau)                                      n_i samples of domain i; tau 1: as they are
    odm           R_i <- a R_i + (1 - a) scale L_i / pi_i  if i was seen, / 1 where ``reward`` is seen
                  e_t  = min(1/K, max(floor, sqrt(ln K / (K t)))),  e_0 = 1/K
                  pi_i = (1 - K e_t) softmax_i(e_{t-1} R) + e_t           Online Data Mixing, arXiv 2312.02406
    doremi        lambda_i = excess_i / targets_i
                  alpha <- (1 - c) alpha exp(eta lambda) / sum + c / K    DoReMi, arXiv 2305.10429; draws 1/K of each

L_i: mean token loss of domain i in the step, t: steps, K: domains. DoReMi's alpha is the objective: the loss of a step
is sum_i alpha_i L_i, whose gradient is as large as that of a mean. Its third stage draws by ``average``, which its
state has. O(K) a step.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ...core.aliases import Floats
from ...core.input.bounds import Amount, AmountOrNone, Beta, CountOrNone
from ...core.input.validation import Frozen
from ...core.policies import DataPolicy, DomainsToMix, Proportions, SeenDomains, State, normalised

Share = Annotated[float, Field(ge=0, le=1)]


class Temperature(Frozen):
    """Settings of shares by size."""

    tau: Amount = 1.0
    """1: as many as there are; above, small domains have more."""


class Odm(Frozen):
    """Settings of Online Data Mixing."""

    smoothing: Beta = 0.9
    """By how much a reward keeps to what it was."""
    scale: Amount = 1.0
    """Of losses, before they are rewards."""
    floor: Share = 0.0
    """The least exploration of a domain; none has more than 1 / domains."""
    warmup_steps: CountOrNone = 0
    """In which shares stay as the recipe has them, while rewards are learned."""
    reward: Literal["seen", "drawn"] = "seen"
    """seen: the loss, since a step of packs shows all domains. drawn: over the share, as where a step shows one."""


class Doremi(Frozen):
    """Settings of DoReMi's second stage."""

    rate: AmountOrNone = 1.0
    """eta"""
    uniform: Share = 1e-3
    """c, the part of alpha that is uniform."""


def mean_losses(seen: SeenDomains) -> Floats:
    """[K] of a token; not a number where nothing of a domain was seen."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(seen.targets > 0, seen.losses / seen.targets, np.nan)


def _start_temperature(of: DomainsToMix, settings: Temperature) -> tuple[State, Proportions]:
    largest = max(of.samples)
    shares = normalised([(count / largest) ** (1 / settings.tau) for count in of.samples])
    return {"shares": shares}, Proportions(shares)


def _step_temperature(state: State, _: SeenDomains, __: Temperature) -> tuple[State, Proportions]:
    return state, Proportions(tuple(state["shares"]))


def _start_odm(of: DomainsToMix, _: Odm) -> tuple[State, Proportions]:
    return {"step": 0, "rewards": [0.0] * len(of.shares), "shares": list(of.shares)}, Proportions(of.shares)


def _step_odm(state: State, seen: SeenDomains, settings: Odm) -> tuple[State, Proportions]:
    shares, rewards, step = np.array(state["shares"]), np.array(state["rewards"]), state["step"] + 1
    fresh = settings.scale * mean_losses(seen) / (shares if settings.reward == "drawn" else 1.0)
    keep = settings.smoothing
    rewards = np.where(seen.targets > 0, keep * rewards + (1 - keep) * fresh, rewards)
    if step > settings.warmup_steps:
        count = len(shares)
        before, now = (_exploration(number, count, settings.floor) for number in (step - 1, step))
        odds = np.exp(before * (rewards - rewards.max()))
        shares = (1 - count * now) * np.array(normalised(odds)) + now
    return {"step": step, "rewards": rewards.tolist(), "shares": shares.tolist()}, Proportions(tuple(shares.tolist()))


def _exploration(step: int, count: int, floor: float) -> float:
    return min(1 / count, max(floor, math.sqrt(math.log(count) / (count * step)))) if step else 1 / count


def _start_doremi(of: DomainsToMix, _: Doremi) -> tuple[State, Proportions]:
    uniform = (1 / len(of.shares),) * len(of.shares)
    return {"step": 0, "alphas": uniform, "average": uniform}, Proportions(uniform, uniform)


def _step_doremi(state: State, seen: SeenDomains, settings: Doremi) -> tuple[State, Proportions]:
    assert seen.excess is not None
    alphas, count, step = np.array(state["alphas"]), len(seen.targets), state["step"] + 1
    excess = np.where(seen.targets > 0, seen.excess / np.maximum(seen.targets, 1), 0.0)
    grown = np.array(normalised(alphas * np.exp(settings.rate * (excess - excess.max()))))
    alphas = (1 - settings.uniform) * grown + settings.uniform / count
    average = np.array(state["average"])
    average = average + (alphas - average) / step
    new = {"step": step, "alphas": alphas.tolist(), "average": average.tolist()}
    return new, Proportions((1 / count,) * count, tuple(alphas.tolist()))


MIXES = {
    "temperature": DataPolicy(_start_temperature, _step_temperature, Temperature),
    "odm": DataPolicy(_start_odm, _step_odm, Odm),
    "doremi": DataPolicy(
        _start_doremi, _step_doremi, Doremi, needs=("excess",), outcome=lambda state: state["average"]
    ),
}
"""By the names that recipes have."""
