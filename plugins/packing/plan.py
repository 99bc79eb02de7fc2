"""Which slices of which sequences form each micro-batch of each rank.

A small portfolio (`ways`) judged by one prediction (`core.simulate.predict`, `core.simulate.step`,
`core.costs.memory`). Equal micro-batches leave smaller bubbles and fit into less memory, but every further one is a
further launch, and a cut sequence keeps its keys and values. So with ``slices: auto`` nothing is cut in a batch whose
sequences all fit into a micro-batch, unless the step gets shorter by `WORTH_A_CUT`; otherwise, and with ``slices:
even`` always, equal micro-batches are taken where the step is at most `EVENNESS_COSTS` longer than the best and they
fit into memory. What is even is the cost of a micro-batch forward and backward together, as both run the same groups.
With ``train.recompute`` a backward replays its forward anyway, so its groups are free (asymmetric partitioning;
SlimPack, arXiv 2509.26246): forward and backward are then each cut for their own cost. Without, groups of its own would
cost the backward one more forward, a third of the step, and are not tried.

512 sequences of Wikipedia up to 256K tokens on 64 ranks take about 20 ms, 65,536 on 1,024 two to three seconds
(benchmarks/planner.py). The global batch is unchanged: only who computes which tokens, and beside which others. A
sequence that costs more than a rank's mean share still bounds the step, since its slices stay on one rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...core.aliases import Ints
from ...core.balance.bound import lower_bound_s
from ...core.costs.costs import Costs
from ...core.costs.memory import activation_budget_bytes, peaks_of_stage
from ...core.errors import EvenloadError
from ...core.plan.limits import Limits
from ...core.plan.step_plan import StepPlan
from ...core.registry import PlanningContext
from ...core.simulate.predict import micro_batch_imbalance, pass_seconds, predict
from ...core.simulate.step import simulate
from .candidates import portfolio, whole
from .config import PackingConfig
from .replay import DoesNotFitError, fit_memory

EVENNESS_COSTS = 0.005
"""Share of the step that equal micro-batches may cost."""
WORTH_A_CUT = 0.01
"""Share of the step that cuts must save where none is needed and ``slices`` is auto."""


def plan(bare: StepPlan, context: PlanningContext, config: PackingConfig) -> StepPlan:
    """The packed plan of the same batch. Raises EvenloadError for what no setting here can plan."""
    lengths = bare.lengths
    limits = limits_for(bare, config)
    cuts = config.slices != "off" and not limits.whole_sequences
    if not cuts:
        refuse_longer(lengths, limits, config)
    costs, bound_s = context.costs, lower_bound_s(lengths, limits, context.costs)
    ways = portfolio(bare, lengths, limits, costs, config, bound_s)
    room = activation_budget_bytes(context.cluster, costs.memory, limits)
    found: list[_Judged] = []
    problem: DoesNotFitError | None = None
    for candidate in ways if cuts else [whole(bare, lengths, limits, costs, bound_s)]:
        try:
            judged = _judge(fit_memory(candidate), context)
        except DoesNotFitError as error:
            problem = error
            continue
        if judged.held_bytes > room and judged.plan.order and all(one.held_bytes > room for one in found):
            judged = _replayed(judged, room, context)
        found.append(judged)
        margin = EVENNESS_COSTS if judged.plan.cut else WORTH_A_CUT
        if judged.step_s <= bound_s * (1 + margin) and judged.held_bytes <= room:
            break  # no later one could be better by more than that
    if not found:
        assert problem is not None
        raise problem
    best = _choose(found, room, needless=config.slices == "auto")
    return replace(best.plan, bound_s=bound_s, notes=(*best.plan.notes, *_notes(best, costs)))


class _Judged(NamedTuple):
    plan: StepPlan
    step_s: float
    uneven: tuple[float, float]
    held_bytes: float
    """The most activations and prefix KV that any rank holds."""


def _judge(plan: StepPlan, context: PlanningContext) -> _Judged:
    """On one stage nothing but compute tells plans apart; between stages hand-overs and the output layer do too."""
    costs, stages = context.costs, plan.limits.num_stages
    passes = pass_seconds(plan, costs)
    held = max(peak for stage in range(stages) for peak, _ in peaks_of_stage(plan, stage))
    alone = stages == 1
    step_s = predict(plan, costs, passes).step_s if alone else simulate(plan, context, record=False).step_s
    return _Judged(plan, step_s, micro_batch_imbalance(plan, costs, passes), held)


def _replayed(judged: _Judged, room: float, context: PlanningContext) -> _Judged:
    """The plan with the replays that bring it into the device's memory; as it was where none do."""
    limits = judged.plan.limits
    try:
        fitted = fit_memory(replace(judged.plan, limits=replace(limits, max_activation_bytes=room)))
    except DoesNotFitError:
        return judged
    return _judge(replace(fitted, limits=limits), context)


def _choose(found: list[_Judged], room: float, *, needless: bool) -> _Judged:
    """Among those that fit into the device, or hold the least if none does, the most even of the fast ones.

    ``needless``: a plan without cuts is taken, if there is one, unless cuts are worth it.
    """
    fitting = [one for one in found if one.held_bytes <= room]
    if not fitting:
        fitting = [min(found, key=lambda one: one.held_bytes)]
    least = min(one.step_s for one in fitting)
    uncut = min((one for one in fitting if not one.plan.cut), key=lambda one: one.step_s, default=None)
    if needless and uncut is not None and uncut.step_s * (1 - WORTH_A_CUT) <= least:
        return uncut
    fast = [one for one in fitting if one.step_s <= least * (1 + EVENNESS_COSTS)]
    return min(fast, key=lambda one: round(max(one.uneven), 3))


def limits_for(bare: StepPlan, config: PackingConfig) -> Limits:
    """The limits with this section's caps. Raises EvenloadError for a cap below two blocks."""
    limits = config.capped(bare.limits)
    if limits.max_tokens < 2 * config.block_tokens - 1 and config.slices != "off":
        # No slice is shorter than a block, so what is left of a sequence can be almost two.
        raise EvenloadError(
            f"{_cap(limits, config)} is smaller than two blocks",
            f"max_tokens {limits.max_tokens}, block_tokens {config.block_tokens}",
            "raise max_tokens, or lower plugins.packing.block_tokens",
        )
    return limits


def refuse_longer(lengths: Ints, limits: Limits, config: PackingConfig) -> None:
    """Raise EvenloadError for a sequence over the token cap, where none may be cut."""
    if len(lengths) and lengths.max() > limits.max_tokens:
        index = int(lengths.argmax())
        raise EvenloadError(
            f"a sequence is longer than {_cap(limits, config)}",
            f"sequence {index} has {lengths[index]} tokens, the cap is {limits.max_tokens}",
            "raise max_tokens, let it be cut (plugins.packing.slices=auto, where the host can), or lower "
            "data.max_length (longer samples are split, truncated or dropped)",
        )


def _cap(limits: Limits, config: PackingConfig) -> str:
    """What the token cap is called."""
    own = limits.max_tokens == config.max_tokens
    return "plugins.packing.max_tokens" if own else "the least max_tokens of all plugins"


def _notes(best: _Judged, costs: Costs) -> list[str]:
    forward, backward = best.uneven
    notes = [f"micro-batches, costliest over mean: forward {forward:.3f}, backward {backward:.3f}"]
    if best.plan.backward:
        notes.append("asymmetric: the backward pass groups slices anew" + (" at no cost" if costs.recompute else ""))
    elif best.plan.replayed:
        notes.append(
            f"{len(best.plan.replayed)} of {len(best.plan.micro_batches)} micro-batches are replayed to save memory"
        )
    return notes
