"""Which slices of which sequences form each micro-batch of each rank.

A small portfolio (`candidates`), judged by `core.planning.judge`. Equal micro-batches leave smaller bubbles and fit
into less memory, but every further one is a further launch, and a cut sequence keeps its keys and values. So with
``slices: auto`` nothing is cut in a batch whose sequences all fit into a micro-batch, unless the step gets shorter by
`WORTH_A_CUT`; otherwise, and with ``slices: even`` always, equal micro-batches are taken where the step is at most
`EVENNESS_COSTS` longer than the best and they fit into memory. What is even is the cost of a micro-batch forward and
backward together, as both run the same groups. With ``train.recompute`` a backward replays its forward anyway, so its
groups are free (asymmetric partitioning; SlimPack, arXiv 2509.26246): forward and backward are then each cut for their
own cost.

512 sequences of Wikipedia up to 256K tokens on 64 ranks take about 20 ms, 65,536 on 1,024 two to three seconds
(benchmarks/planning/planner.py). The global batch is unchanged: only who computes which tokens, and next to which
others. A sequence that costs more than a rank's mean share still bounds the step, since its slices stay on one rank.
"""

from __future__ import annotations

from dataclasses import replace

from ...core.aliases import Ints
from ...core.balance.bound import lower_bound_s
from ...core.costs.context import PlanningContext
from ...core.costs.costs import Costs
from ...core.errors import EvenloadError
from ...core.plan.limits import Limits
from ...core.plan.step_plan import StepPlan
from ...core.planning.judge import Candidate, Preference, best, budget_bytes, judge, outcome_of
from ...core.planning.parts import parts_of
from ...core.simulate.predict import micro_batch_imbalance
from . import padded
from .candidates import portfolio, whole
from .config import PackingConfig
from .replay import ReplayCapError, fit_memory
from .whole import units_of

WORTH_A_CUT = 0.01
"""Share of the step that cuts must save where none is needed and ``slices`` is auto."""
UNCUT = Preference(slack=1 / (1 - WORTH_A_CUT) - 1, among=lambda one: not one.plan.cut)
EVENNESS_COSTS = 0.005
"""Share of the step that equal micro-batches may cost."""
_FIXED = "largest_first: slices or passes of this plan have an order of their own, which stays"


def plan(incoming: StepPlan, context: PlanningContext, config: PackingConfig) -> StepPlan:
    """The packed plan of the same batch. Raises EvenloadError for what no setting here can plan."""
    lengths = incoming.lengths
    limits = limits_for(incoming, config)
    whole_only = limits.whole_sequences or limits.groups_in_micro_batch or limits.padded
    cuts = config.slices != "off" and not whole_only
    if not cuts:
        refuse_longer(lengths, limits, config)
    if limits.groups_in_micro_batch:
        _refuse_larger_groups(incoming, limits, context.costs, config)
    costs, bound_s = context.costs, lower_bound_s(lengths, limits, context.costs, context.head_frac)
    if limits.padded:
        bound_s = max(bound_s, padded.bound_s(lengths, limits, context))
        incoming = incoming.revised(bound_s=bound_s)
    elif parts := parts_of(lengths, limits, context):
        part_limits, part_context = parts.plane(limits, context)
        own = plan(StepPlan(parts.lengths, (), part_limits), part_context, config)
        if (joined := parts.joined(own, incoming, limits, config.block_tokens)) is not None:
            return joined.revised(bound_s=bound_s)
    if cuts:
        drafts = portfolio(incoming, limits, costs, config, bound_s)
    elif limits.padded:
        drafts = padded.portfolio(incoming, limits, context)
    else:
        drafts = iter([whole(incoming, limits, costs, bound_s)])
    candidates: list[Candidate] = []
    problem: ReplayCapError | None = None
    for draft in drafts:
        try:
            candidate = judge(fit_memory(draft.rounded()).rounded(), context)
        except ReplayCapError as error:
            problem = error
            continue
        if not candidate.fits and candidate.plan.order and not any(one.fits for one in candidates):
            candidate = _replayed(candidate, context)
        candidates.append(candidate)
        margin = EVENNESS_COSTS if candidate.plan.cut else WORTH_A_CUT
        at_bound = candidate.fits and outcome_of(candidate.plan, context).working_s <= bound_s * (1 + margin)
        if at_bound or (limits.padded and candidate.fits):
            break  # no later one could be better by more than that
    evenest = Preference(slack=EVENNESS_COSTS, key=lambda one: round(max(micro_batch_imbalance(one.plan, costs)), 3))
    chosen = best(candidates, (UNCUT, evenest) if config.slices == "auto" else (evenest,))
    if chosen is None:
        assert problem is not None
        raise problem
    final = chosen.plan
    fixed = (_FIXED,) if config.largest_first and not final.is_sortable else ()
    return final.revised(notes=(*final.notes, *fixed, *_notes(final, costs)))


def _replayed(candidate: Candidate, context: PlanningContext) -> Candidate:
    """The plan with the replays that bring it into the device's memory; as it was where none do."""
    limits = candidate.plan.limits
    room_bytes = budget_bytes(limits, context)
    try:
        fitted = fit_memory(replace(candidate.plan, limits=replace(limits, max_activation_bytes=room_bytes)))
    except ReplayCapError:
        return candidate
    return judge(replace(fitted, limits=limits), context)


def limits_for(incoming: StepPlan, config: PackingConfig) -> Limits:
    """The limits with this section's caps. Raises EvenloadError for a cap below two blocks."""
    limits = config.capped(incoming.limits)
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
            "raise max_tokens, let it be cut (plugins.packing.slices=auto, where the host can), or shorten the samples "
            "(longer ones than data.max_length are split, truncated or dropped)",
        )


def _refuse_larger_groups(incoming: StepPlan, limits: Limits, costs: Costs, config: PackingConfig) -> None:
    tokens = units_of(incoming, costs).tokens
    if tokens.max(initial=0) > limits.max_tokens:
        raise EvenloadError(
            f"a group of samples that stays in one micro-batch is longer than {_cap(limits, config)}",
            f"{tokens.max()} tokens, the cap is {limits.max_tokens}",
            "raise max_tokens, or set plugins.packing.groups_in to rank",
        )


def _cap(limits: Limits, config: PackingConfig) -> str:
    own = limits.max_tokens == config.max_tokens
    return "plugins.packing.max_tokens" if own else "the least max_tokens of all plugins"


def _notes(plan: StepPlan, costs: Costs) -> list[str]:
    forward, backward = micro_batch_imbalance(plan, costs)
    notes = [f"micro-batches, costliest over mean: forward {forward:.3f}, backward {backward:.3f}"]
    if plan.backward:
        notes.append("asymmetric: the backward pass groups slices anew" + (" at no cost" if costs.recompute else ""))
    elif plan.replayed:
        notes.append(f"{len(plan.replayed)} of {len(plan.micro_batches)} micro-batches are replayed to save memory")
    return notes
