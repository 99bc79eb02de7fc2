"""How many ranks, and which, share each sequence: a portfolio judged by the simulator.

hybrid   long sequences on as many ranks as they deserve, one micro-batch each, short ones packed on single ranks
         (`hybrid_dp`; ByteScale, arXiv 2502.21231)
rounds   all ranks run one micro-batch at a time, in which long sequences are on many ranks and short ones on one; their
         loads add up on a rank (`rounds`; Zeppelin, arXiv 2509.21841)
groups   rounds in disjoint groups of ranks (`disjoint_groups`; FlexSP, arXiv 2412.01523)
chains   long sequences in slices, each slice on several ranks (`slice_chains`): where even all ranks cannot hold one at
         once, and in pipelines, whose stages wait less for smaller micro-batches
incoming the plan that came in, of the packing plugin; where sequences are few, also the plans of others (`baselines`)

Objective: least predicted seconds of the step among lawful plans; those predicted to fit into the device first. The
degree of a sequence is chosen by the seconds that further ranks save and cost, with memory as a cap only; any number of
ranks, not powers of two. 512 sequences on 64 ranks take about 0.1 s (benchmarks/planning/mesh.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...core.aliases import Ints
from ...core.costs.context import PlanningContext
from ...core.costs.memory import activation_budget_bytes
from ...core.errors import EvenloadError, PlanError
from ...core.laws import check
from ...core.plan.limits import Limits
from ...core.plan.step_plan import StepPlan
from ...core.plan.token_layout import tokens_of_ranks
from ...core.planning.judge import FASTEST, Candidate, beside, best, fastest, fitting_s, floor_s, judge, judged
from ...core.planning.parts import parts_of
from ...core.planning.stock import UNCAPPED
from .baselines import BASELINES, cp_1
from .bounds import lower_bound_s
from .candidates.host_offload import offloaded
from .candidates.levelled import levelled
from .candidates.slice_chains import chained, sharing
from .candidates.uncut import uncut
from .config import MeshConfig
from .cost_table import LEAST_TOKENS, CostTable, SequenceCosts, cost_table_of
from .emit.blocks import compute_seconds, fitted, in_blocks
from .emit.step import limits_for, step
from .settings import breaks

_FEW = 4
"""Sequences to a rank up to which all plans of others are judged here too: few do not level, and luck decides."""
_PLAYED = 1 << 18
"""Passes of all stages that are played for plans of slices, the most promising first; one is played in any case."""
_NEAR = 1.03
"""Step over the fastest candidate's up to which one is levelled."""


def plan(incoming: StepPlan, context: PlanningContext, config: MeshConfig) -> StepPlan:
    """The plan of the same batch with ranks shared out anew. Raises EvenloadError for what no ranks here can hold."""
    lengths, limits = incoming.lengths, limits_for(incoming, context, config)
    kept = _under(incoming, limits)
    if limits.whole_sequences:
        return kept or _on_single_ranks(incoming, limits, context, config)
    if kept and limits.num_ranks == 1:
        return kept
    if not len(lengths):
        return step(incoming, limits, [], "mesh")
    chosen = _chosen(incoming, kept, limits, context, config)
    return chosen.revised(bound_s=lower_bound_s(lengths, limits, context, config))


def _chosen(
    incoming: StepPlan, kept: StepPlan | None, limits: Limits, context: PlanningContext, config: MeshConfig
) -> StepPlan:
    """The best of our plans, of those of others, and of the one that came in, without a bound. Raises EvenloadError."""
    candidates = [judge(kept, context)] if kept else []
    notes: list[str] = []
    others: dict[str, StepPlan] = {}
    if (divided := _in_parts(incoming, limits, context, config)) is not None:
        candidates += judged([divided], context, candidates)
    else:
        others = _of_the_plane(incoming, limits, context, config, candidates, notes)
    if limits.num_stages == limits.together == 1:
        near = [one.plan for one in candidates if one.step_s <= _NEAR * fitting_s(candidates)]
        candidates += judged((plan for one in near for plan in levelled(one, context)), context, candidates)
    if config.offload == "auto" and candidates and not any(one.fits for one in candidates):
        quickest = min(candidates, key=fastest)
        candidates += judged(offloaded(quickest.plan, context), context)
    chosen = _lawful(candidates)
    if chosen is None:
        raise EvenloadError("no way was found to share these sequences out", f"{len(incoming.lengths)} sequences")
    ours, faster = chosen.plan, {one.plan.made_by for one in candidates if one.step_s < chosen.step_s}
    return beside(
        ours.revised(made_by=_made_by(incoming, ours), notes=(*ours.notes, *_notes(ours, candidates), *notes)),
        (f"mesh.{name}" for name, other in others.items() if other.made_by not in faster),
    )


def _in_parts(incoming: StepPlan, limits: Limits, context: PlanningContext, config: MeshConfig) -> StepPlan | None:
    """The plan of one of many equal parts for all of them; None where the plane has none."""
    if (parts := parts_of(incoming.lengths, limits, context)) is None:
        return None
    part_limits, part_context = parts.plane(limits, context)
    alone = StepPlan(parts.lengths, (), part_limits)
    try:
        part = _chosen(alone, None, limits_for(alone, part_context, config), part_context, config)
    except EvenloadError:  # so few ranks do not hold the longest
        return None
    return parts.joined(part, incoming, limits)


def _of_the_plane(
    incoming: StepPlan,
    limits: Limits,
    context: PlanningContext,
    config: MeshConfig,
    candidates: list[Candidate],
    notes: list[str],
) -> dict[str, StepPlan]:
    """Baselines of the batch by name; they and all of our own plans are judged, and added to ``candidates``."""
    lengths = incoming.lengths
    cost_table = cost_table_of(context, limits, config, int(lengths.max()))
    anywhere = cost_table.of(lengths)
    shares = anywhere.under(limits.max_tokens)
    too_long = not np.isfinite(shares.fastest).all()
    if not too_long:
        candidates += judged(uncut(incoming, limits, cost_table, anywhere, config), context, candidates)
    if too_long or limits.num_stages > 1:
        candidates += judged(
            _sliced(incoming, limits, cost_table, config, notes, fitting_s(candidates)), context, candidates
        )
    if not candidates:
        _refuse_longer(lengths, shares, limits)
    others = _baselines(incoming, limits, context, config)
    candidates += judged(others.values(), context, candidates)
    return others


def _lawful(candidates: list[Candidate]) -> Candidate | None:
    """The best candidate that breaks no law; None without any. Raises PlanError where each of them breaks one."""
    left, problem = list(candidates), None
    while (chosen := best(left, (FASTEST,), unfit=fastest)) is not None:
        try:
            check(chosen.plan)
            return chosen
        except PlanError as error:
            problem = error
            left.remove(chosen)
    if problem:
        raise problem
    return None


def _sliced(
    incoming: StepPlan, limits: Limits, cost_table: CostTable, config: MeshConfig, notes: list[str], bar_s: float
) -> Iterator[StepPlan]:
    """Plans of sequences in slices, the most promising divisions first, as many as there is work for; rest is noted.
    Left out are those that by their floor take no less than ``bar_s``."""
    context = cost_table.context
    budget_bytes = activation_budget_bytes(context.cluster, context.costs.memory, limits)
    price = context.costs.forward.plus(context.costs.backward)
    divisions = chained(incoming.lengths, cost_table, limits, notes)
    ranked = sorted(divisions, key=lambda blocks: compute_seconds(blocks, price, limits.num_stages))
    passes = 0
    for blocks in ranked[: 2 + 2 * config.effort]:
        if passes > _PLAYED:
            notes.append("mesh: a large batch in slices: not every division of it was simulated")
            return
        draft = in_blocks(incoming, limits, sharing(blocks, cost_table), "mesh (chains)")
        passes += 2 * sum(len(m.ranks) for m in draft.micro_batches) * limits.num_stages
        if floor_s(draft, context, bar_s) < bar_s:
            yield fitted(draft, budget_bytes)


def _under(incoming: StepPlan, limits: Limits) -> StepPlan | None:
    """The plan that came in under these limits; None where there is none, or it is over their cap."""
    if not incoming.micro_batches:
        return None
    most = max(max(tokens_of_ranks(m).values()) for m in (*incoming.micro_batches, *incoming.backward))
    if most > limits.max_tokens:
        return None
    return incoming if incoming.limits == limits else incoming.revised(limits=limits)


def _on_single_ranks(incoming: StepPlan, limits: Limits, context: PlanningContext, config: MeshConfig) -> StepPlan:
    """For hosts that cut and share nothing. Raises EvenloadError for a sequence over a cap that the recipe sets."""
    alone = cp_1(incoming, context, config)
    if alone.limits.max_tokens == limits.max_tokens:
        return alone
    longest = int(incoming.lengths.max())
    if config.max_tokens is not None or incoming.limits.max_tokens < UNCAPPED:
        raise EvenloadError(
            "a sequence is longer than a micro-batch may be, in a loop that runs each on one rank",
            f"{longest} tokens, the cap is {limits.max_tokens}",
            "raise plugins.mesh.max_tokens, or shorten the samples (data.max_length)",
        )
    note = f"mesh: {longest} tokens run at once, {limits.max_tokens} are predicted to fit into the device"
    return alone.revised(notes=(*alone.notes, note))


def _baselines(incoming: StepPlan, limits: Limits, context: PlanningContext, config: MeshConfig) -> dict[str, StepPlan]:
    """Baselines that keep caps and settings. With many sequences degrees by memory alone may level best."""
    few, free = len(incoming.lengths) <= _FEW * limits.num_ranks, limits.together == 1 and limits.num_stages == 1
    plans = {
        name: BASELINES[name].plan(incoming, context, config)
        for name in BASELINES
        if few or (name == "memory_degree" and free)
    }
    return {
        name: plan.revised(made_by=f"mesh ({name})")
        for name, plan in plans.items()
        if plan.limits.max_tokens == limits.max_tokens and not breaks(plan, config)
    }


def _refuse_longer(lengths: Ints, shares: SequenceCosts, limits: Limits) -> None:
    lost = np.flatnonzero(~np.isfinite(shares.fastest))
    if len(lost):
        index = int(lost[lengths[lost].argmax()])
        raise EvenloadError(
            "a sequence is longer than all ranks that may share it can hold",
            f"sequence {index} has {lengths[index]} tokens, the cap of a rank is {limits.max_tokens}, and a slice has "
            f"{LEAST_TOKENS} tokens or more on each of its ranks",
            "raise plugins.mesh.max_tokens or max_degree, allow more cp_comm types, or shorten the samples "
            "(data.max_length)",
        )


def _made_by(incoming: StepPlan, chosen: StepPlan) -> str:
    if chosen.made_by.startswith("mesh"):
        return "mesh"
    return f"{incoming.made_by}, mesh" if incoming.made_by else "mesh"


def _notes(chosen: StepPlan, candidates: list[Candidate]) -> list[str]:
    degrees = sorted({len(m.ranks) for m in chosen.micro_batches if m.slices})
    cp_groups = sorted({len(cp_group) for m in chosen.micro_batches for cp_group in m.cp_groups})
    names = sorted({one.plan.made_by for one in candidates})
    return [
        f"{chosen.made_by}: micro-batches on {_range(degrees)} ranks"
        + (f", sequences on {_range(cp_groups)}" if cp_groups else ""),
        f"{len(candidates)} plans were simulated: {', '.join(names)}",
    ]


def _range(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}" if values else "no"
