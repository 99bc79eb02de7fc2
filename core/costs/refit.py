"""Fits the cost model to measured steps while training, so that plans follow the hardware.

A step tells, for each rank, how long its forwards and its backwards took in sum. With L launches, T tokens and P
(query, key) pairs of a rank in a direction (a micro-batch on d ranks counts a d-th of its tokens and pairs)

    forward_s  = f . (L, T, P)
    backward_s = b . (L, T, P) + f . (L", T", P")          " : replayed micro-batches, whose forward runs again

with f and b the (launch_s, token_s, pair_s) of `Costs`, all of one pipeline stage. Ranks that are packed evenly have
almost the same mix of tokens and pairs, so most steps show only sums; what they do not show is left to the costs that
the run began with (the prior). The prior's ratios are held, its scale is not: a first guess may be off by a machine.

    x_i = coefficient i / (scale * prior i)
    minimise  sum over rows k of  w_k (predicted_k / measured_k - 1)^2  +  noise^2 * sum_i (x_i - 1)^2,    x_i >= 0

``scale`` is the median of measured / prior, by direction. ``w_k`` are Tukey's biweights (Beaton and Tukey,
Technometrics 16, 1974) of the residuals, found by reweighting: a step that was disturbed counts for nothing. ``noise``
is the residuals' deviation, at least LEAST_NOISE: rows that scatter must not bend coefficients, whose own deviation is
taken to be 1. A coefficient whose prior is 0 is held at 0, in a unit by which it would be a tenth of the mean row.

What a step takes beyond its passes and the predicted communication becomes ``update_s``: the median over the window.

O(rows) a step, on one rank: ranks must plan with the same numbers to the last bit, so they take that rank's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..aliases import Floats
from ..plan.step_plan import StepPlan
from .costs import Costs, PassCost, SettingCosts, rank_works

WINDOW_STEPS = 16
"""Steps that count. A cost model of 6 numbers needs few; a machine changes slowly."""
FEWEST_STEPS = 3
"""Before that the prior stands: one odd step of three is seen to be odd."""
MOST_ROWS = 4096
"""With many ranks fewer steps tell as much, and the window goes into every checkpoint."""
LEAST_NOISE = 0.05
"""Relative. The model itself is no better, and few rows may fit by chance."""
_CUT = 4.685
"""Residuals beyond so many standard deviations count for nothing (95 % efficient on normal errors)."""
_ROUNDS = 20


AnyCosts = TypeVar("AnyCosts", Costs, SettingCosts)


def coefficients(costs: Costs | SettingCosts) -> Floats:
    """Launch, token (with its experts) and pair seconds forward, then backward, then ``update_s``: float64 [7]."""
    passes = [(c.launch_s, c.linear_s, c.pair_s) for c in (costs.forward, costs.backward)]
    return np.array([*passes[0], *passes[1], costs.update_s])


def with_coefficients(costs: AnyCosts, values: Floats) -> AnyCosts:
    """Costs with other coefficients. Experts keep their share of a token's seconds, which steps do not show."""
    rows = zip((costs.forward, costs.backward), values[:6].reshape(2, 3).tolist(), strict=True)
    forward, backward = (_pass_cost(own, *row) for own, row in rows)
    return costs.model_copy(update={"forward": forward, "backward": backward, "update_s": float(values[6])})


def _pass_cost(own: PassCost, launch_s: float, token_s: float, pair_s: float) -> PassCost:
    expert_s = token_s * own.expert_s / own.linear_s if own.expert_s else 0.0
    return PassCost(launch_s=launch_s, token_s=token_s - expert_s, expert_s=expert_s, pair_s=pair_s)


def rows_of(plan: StepPlan, recompute: bool) -> Floats:
    """Columns of the equation above for every rank and direction: float64 [ranks, 2, 6].

    ``recompute``: backward coefficients hold a forward already (`Costs.recompute`). The forward row of a rank is zero
    where forwards of it keep nothing: such a pass has no graph and no head, or is left out, and would mislead. So is
    the backward row where the plan recomputes other layers than the coefficients hold.
    """
    limits = plan.limits
    work = np.zeros((limits.num_ranks, 2, 6))
    odd = np.zeros(limits.num_ranks, dtype=np.bool_)
    for i, micro_batch in enumerate(plan.micro_batches):
        for rank, amounts in rank_works(micro_batch).items():
            work[rank, 0, :3] += amounts
            odd[rank] |= i not in plan.kept
    replayed = frozenset() if recompute else frozenset(plan.replayed)
    again = np.mean(plan.recompute, axis=0) / limits.mean_layers if plan.recompute else None
    for j, micro_batch in enumerate(plan.passes("B")):
        for rank, amounts in rank_works(micro_batch).items():
            work[rank, 1, 3:] += amounts
            if j in replayed:
                work[rank, 1, :3] += amounts
            if again is not None:
                work[rank, 1, 1:3] += again[j] * np.array(amounts[1:])
    work[odd, 0] = 0.0
    if recompute and plan.recompute:
        work[:, 1] = 0.0
    return work


def fit(prior: Floats, work: Floats, seconds: Floats) -> Floats:
    """Coefficients [6] that explain ``seconds`` [N] of ``work`` [N, 6], held by ``prior`` [6]; see above."""
    known = (seconds > 0) & work.any(axis=1)
    work, seconds = work[known], seconds[known]
    if not len(seconds):
        return prior
    held = prior * _scales(prior, work, seconds)
    share = 0.1 * seconds.mean() / np.maximum(work.mean(axis=0), 1e-300)
    # What no row holds has no unit either: it keeps its prior.
    unit = np.where(held > 0, held, np.where(work.any(axis=0), share, 0.0))
    columns, centre = work * unit / seconds[:, None], (held > 0).astype(np.float64)
    weights = np.ones(len(seconds))
    x, noise = centre, LEAST_NOISE
    for _ in range(_ROUNDS):
        x = _ridge(columns, weights, centre, noise)
        residual = np.abs(columns @ x - 1.0)
        noise = max(LEAST_NOISE, 1.4826 * float(np.median(residual)))
        weights = np.clip(1 - (residual / (_CUT * noise)) ** 2, 0.0, None) ** 2
    return unit * x


def _scales(prior: Floats, work: Floats, seconds: Floats) -> Floats:
    """By how much the prior is off in each direction: float64 [6], one number for each three."""
    forward, backward = work[:, :3] @ prior[:3], work[:, 3:] @ prior[3:]
    both = _median(seconds, forward + backward, 1.0)
    pure = backward == 0
    forward_scale = _median(seconds[pure], forward[pure], both)
    backward_scale = _median((seconds - forward_scale * forward)[~pure], backward[~pure], both)
    # Replays that take longer than their whole backward: the forward's scale is not to be trusted alone.
    return np.repeat([forward_scale, backward_scale if backward_scale > 0 else both], 3)


def _median(seconds: Floats, expected: Floats, instead: float) -> float:
    measurable = expected > 0
    return float(np.median(seconds[measurable] / expected[measurable])) if measurable.any() else instead


def _ridge(columns: Floats, weights: Floats, centre: Floats, hold: float) -> Floats:
    """Weighted least squares of ``columns @ x = 1`` towards ``centre``; what comes out negative is set to zero."""
    root = np.sqrt(weights)[:, None]
    system = np.vstack([columns * root, hold * np.eye(columns.shape[1])])
    target = np.concatenate([root[:, 0], hold * centre])
    active = list(range(columns.shape[1]))
    x = np.zeros(columns.shape[1])
    while active:
        part, *_ = np.linalg.lstsq(system[:, active], target, rcond=None)
        if (part >= 0).all():
            x[active] = part
            break
        active.remove(active[int(part.argmin())])
    return x


class _Step(NamedTuple):
    work: Floats
    """[rows, 6]"""
    seconds: Floats
    """[rows]"""
    rest_s: float


class Window:
    """The last steps, on the rank that fits."""

    def __init__(self, prior: Costs) -> None:
        self._prior = coefficients(prior)
        self._steps: deque[_Step] = deque()

    def add(self, work: Floats, forward_s: Floats, backward_s: Floats, rest_s: float) -> None:
        """Count a step: ``work`` of `rows_of`, seconds [ranks] as measured at one stage, and `rest_of_step`."""
        seconds = np.stack([forward_s, backward_s], axis=1)
        self._steps.append(_Step(work.reshape(-1, 6), seconds.reshape(-1), rest_s))
        most = max(FEWEST_STEPS, min(WINDOW_STEPS, MOST_ROWS // seconds.size))
        while len(self._steps) > most:
            self._steps.popleft()

    def coefficients(self) -> Floats:
        """The newest, as `coefficients` has them: float64 [7]."""
        if len(self._steps) < FEWEST_STEPS:
            return self._prior
        work, seconds = (np.concatenate([getattr(s, name) for s in self._steps]) for name in ("work", "seconds"))
        update_s = max(0.0, float(np.median([s.rest_s for s in self._steps])))
        return np.array([*fit(self._prior[:6], work, seconds), update_s])

    def state(self) -> list[dict[str, Any]]:
        """For a checkpoint; survives JSON to the last bit."""
        return [{"work": s.work.tolist(), "seconds": s.seconds.tolist(), "rest_s": s.rest_s} for s in self._steps]

    def restore(self, state: list[Mapping[str, Any]]) -> None:
        """Go on with what `state` gave."""
        self._steps = deque(
            _Step(np.array(s["work"]).reshape(-1, 6), np.array(s["seconds"]), float(s["rest_s"])) for s in state
        )


def rest_of_step(
    step_s: float, predicted_s: float, compute_s: float, busiest: tuple[float, float], update_s: float, shares: int
) -> float:
    """``update_s`` of the whole stage by one step.

    ``step_s`` as measured, without waiting for the plan; ``predicted_s`` by `simulate`, with everything, ``compute_s``
    by `predict`, passes alone; ``busiest``: seconds of the busiest rank, (measured, predicted), by which passes took
    longer; ``update_s`` of the costs that predicted; ``shares``: ranks that share the update.
    """
    measured, expected = busiest
    passes_s = compute_s * measured / expected if expected else measured
    talk_s = predicted_s - compute_s - update_s / shares
    return (step_s - passes_s - talk_s) * shares
