"""The one judge of candidates: plugins make plans, this module says which of them runs.

    among the lawful plans that fit into the device, the one of least simulated seconds

A `Preference` may put another plan first that is nearly as fast: less memory, no cuts, evener micro-batches. It is
data, and it never picks a plan that is slower than a baseline among the candidates. A plan is simulated once: what it
comes to stays with it (`outcome_of`) for the next plugin, the chain and the command line.

`floor_s` prices a plan from below without playing it: where that is no less than what is known already, the plan need
not be simulated to be left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..balance.step_bound import passes_bound_s
from ..costs.context import PlanningContext
from ..costs.memory import activation_budget_bytes
from ..errors import PlanError
from ..machine.layout import most_share
from ..plan.limits import Limits
from ..plan.rounds import in_rounds
from ..plan.step_plan import Lengths, StepPlan, fact_of_plan
from ..registry import Keeps
from ..simulate.passes import PassTimes
from ..simulate.predict import busy_seconds
from ..simulate.step import Simulation, after_passes_s, simulate
from ..simulate.v_shape import merged

SMALL = 1 << 14
"""Sequences x ranks of a batch up to which every baseline is weighed against a plan that is not at its bound."""
NEXT_TO_BOUND = 1.001
"""Passes over their certified bound up to which baselines are not planned for larger batches,"""
CLOSING = 1.01
"""and the step with a gradient sum that a baseline might have hidden."""


class Candidate(NamedTuple):
    """A plan and what it comes to, predicted."""

    plan: StepPlan
    step_s: float
    peak_bytes: float
    """The most that a rank of any stage holds, weights and optimizer included."""
    missing_bytes: float
    """By how much its passes hold more than the device has for them; not positive where the plan fits."""
    bubble_frac: float
    baseline: str = ""
    """The baseline whose answer it is; empty: a planner's own."""

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0


class UnwantedError(BaseException):
    """Nobody waits any more for the plan that this thread works on."""


wanted_no_more: ContextVar[Callable[[], bool]] = ContextVar("wanted_no_more", default=lambda: False)
"""Whether the plan that this thread works on is waited for no more: it then ends with its next candidate."""


def check_wanted() -> None:
    """Raise UnwantedError in a thread whose plan nobody waits for."""
    if wanted_no_more.get()():
        raise UnwantedError


class _Identity:
    """A planning context as a key: equal to itself alone."""

    __slots__ = ("context",)

    def __init__(self, context: PlanningContext) -> None:
        self.context = context

    def __hash__(self) -> int:
        return id(self.context)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.context is self.context


_DEPENDS_ON = ("lengths", "micro_batches", "backward", "replayed", "order", "merge", "recompute", "offload", "limits")
"""What a simulation depends on. Caps, the only other numbers of the limits that plans of a batch differ in, change
nothing in it."""


@fact_of_plan(*_DEPENDS_ON)
def _times(plan: StepPlan, key: _Identity) -> PassTimes:
    return PassTimes(plan, key.context)


@fact_of_plan(*_DEPENDS_ON)
def _outcome(plan: StepPlan, key: _Identity) -> Simulation:
    return simulate(plan, key.context, record=False, times=_times(plan, key))


@fact_of_plan(*_DEPENDS_ON)
def _rivals(plan: StepPlan) -> set[str]:
    return set()


def outcome_of(plan: StepPlan, context: PlanningContext) -> Simulation:
    """What a plan comes to, without its timeline; worked out once. Raises PlanError for one whose ranks deadlock."""
    return _outcome(plan, _Identity(context))


def judge(plan: StepPlan, context: PlanningContext, baseline: str = "") -> Candidate:
    """The plan, in rounds where ranks run in step, with its simulated seconds and bytes.

    Raises PlanError for one whose ranks would wait for each other.
    """
    check_wanted()
    plan = merged(in_rounds(plan))
    outcome = outcome_of(plan, context)
    missing_bytes = float(outcome.activation_bytes.max()) - budget_bytes(plan.limits, context)
    peak_bytes = float(outcome.peak_bytes.max())
    return Candidate(plan, outcome.step_s, peak_bytes, missing_bytes, outcome.bubble_frac, baseline)


def budget_bytes(limits: Limits, context: PlanningContext) -> float:
    """What passes may hold on a device. No plan makes the update smaller, so what that takes is there in any case."""
    memory = context.costs.memory
    budget = activation_budget_bytes(context.cluster, memory, limits)
    free = math.isinf(limits.max_activation_bytes)
    return max(budget, most_share(limits.layers) * memory.update_bytes) if free else budget


def floor_s(plan: StepPlan, context: PlanningContext, bar_s: float = math.inf) -> float:
    """The step of a plan takes no less [s]: passes of a stage's busiest rank, and one micro-batch on the way there.

    What follows the last pass is added. The first forward of a stage comes through all stages before it, and its last
    backward goes back through them, unless weight gradients are a pass of their own. Stages that come after one which
    takes ``bar_s`` already are not asked.
    """
    times, after_s = _times(plan, _Identity(context)), after_passes_s(context)
    way_s, least_s = 0.0, after_s
    alike: dict[Any, tuple[float, float]] = {}
    for stage in range(plan.limits.num_stages):
        if least_s >= bar_s:
            break
        key = times.alike(stage), plan.split[stage] if plan.split else ()
        if key not in alike:
            forward, backward = times.whole_s(stage)
            on_way_s = min(forward, default=0.0) + (0.0 if any(plan.split) else min(backward, default=0.0))
            alike[key] = max(busy_seconds(plan, (forward, backward), {})), on_way_s
        least_s = max(least_s, alike[key][0] + way_s + after_s)
        way_s += alike[key][1]
    return least_s


def least_s(
    keeps: Keeps | None, lengths: Lengths, limits: Limits, context: PlanningContext, *, orders: bool = False
) -> float:
    """No plan that keeps its sequences so takes a step of less under these limits [s]; lengths int64 [K] in tokens."""
    if keeps is None:
        return 0.0
    if keeps == "whole" and lengths.max(initial=0) > limits.max_tokens:
        return math.inf
    return passes_bound_s(lengths, limits, context, orders=orders) + after_passes_s(context)


def certified_s(plan: StepPlan, context: PlanningContext) -> float:
    """No plan of the settings takes a step of less [s]; 0 where nothing is certified."""
    return plan.bound_s + after_passes_s(context) if plan.bound_s else 0.0


def at_bound(plan: StepPlan, context: PlanningContext) -> bool:
    """Whether no other plan takes less, or for large batches next to nothing less."""
    outcome, after_s = outcome_of(plan, context), after_passes_s(context)
    if len(plan.lengths) * plan.limits.num_ranks <= SMALL:
        return outcome.step_s <= plan.bound_s + after_s
    near = outcome.passes_s <= NEXT_TO_BOUND * plan.bound_s
    return near and outcome.step_s <= CLOSING * plan.bound_s + after_s


@dataclass(frozen=True)
class Preference:
    """Which plan is put first among those that are about as fast as the fastest."""

    slack: float = 0.0
    """Share of the step by which the plan may be slower than the fastest."""
    key: Callable[[Candidate], Any] = lambda candidate: candidate.step_s
    """The least of this wins; of equal ones the earliest candidate."""
    among: Callable[[Candidate], bool] = lambda candidate: True
    """Which plans the preference is about."""


FASTEST = Preference()


def smallest(candidate: Candidate) -> tuple[float, float]:
    """What is least for the plan that holds least, and of equal ones for the fastest."""
    return candidate.missing_bytes, candidate.step_s


def fastest(candidate: Candidate) -> tuple[float, float]:
    """What is least for the fastest plan, and of equal ones for the smallest."""
    return candidate.step_s, candidate.missing_bytes


def best(
    candidates: Iterable[Candidate],
    preferences: Iterable[Preference] = (FASTEST,),
    unfit: Callable[[Candidate], tuple[float, float]] = smallest,
) -> Candidate | None:
    """The candidate that runs; None where there is none.

    Args:
        preferences: the first one that finds a plan decides.
        unfit: of which the plan has least that runs where none fits.
    """
    everything = list(candidates)
    if not everything:
        return None
    fitting = [one for one in everything if one.fits]
    if not fitting:
        return min(everything, key=unfit)
    least_s = fitting_s(fitting)
    ceiling_s = min((one.step_s for one in fitting if one.baseline), default=math.inf)
    for preference in (*preferences, FASTEST):
        limit_s = min(ceiling_s, least_s * (1 + preference.slack))
        allowed = [one for one in fitting if one.step_s <= limit_s and preference.among(one)]
        if allowed:
            return min(allowed, key=preference.key)
    raise AssertionError("the fastest candidate is always allowed")


def beside(plan: StepPlan, baselines: Iterable[str]) -> StepPlan:
    """The plan, known from now on to have been chosen in comparison with these baselines (``plugin.name``)."""
    _rivals(plan).update(baselines)
    return plan


def rivals_of(plan: StepPlan) -> frozenset[str]:
    """The baselines (``plugin.name``) that the plan is known to be no slower than."""
    return frozenset(_rivals(plan))


def fitting_s(candidates: Iterable[Candidate]) -> float:
    """The step of the fastest that fits [s]; infinite where none does."""
    return min((one.step_s for one in candidates if one.fits), default=math.inf)


def judged(plans: Iterable[StepPlan], context: PlanningContext, known: Iterable[Candidate] = ()) -> list[Candidate]:
    """Candidates of these plans, those left out whose ranks would wait for each other, and those that by their floor
    take no less than one that fits, here or among the ``known``."""
    bar_s, candidates = fitting_s(known), []
    for plan in plans:
        try:
            if floor_s(plan := merged(in_rounds(plan)), context, bar_s) >= bar_s:
                continue
            candidate = judge(plan, context)
        except PlanError:
            continue
        candidates.append(candidate)
        bar_s = min(bar_s, candidate.step_s) if candidate.fits else bar_s
    return candidates
