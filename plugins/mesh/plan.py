"""How many ranks, and which, share each sequence: a portfolio judged by the simulator.

gangs    long sequences on as many ranks as they deserve, one micro-batch each, short ones packed on single ranks beside
         (`gangs`; ByteScale, arXiv 2502.21231)
rounds   all ranks run one micro-batch at a time, in which long sequences are on many ranks and short ones on one; their
         loads add up on a rank (`rounds`, `zones`; Zeppelin, arXiv 2509.21841)
groups   rounds in disjoint groups of ranks (`groups`; FlexSP, arXiv 2412.01523)
chains   long sequences in slices, each slice on several ranks (`chains`): where even all ranks cannot hold one at once,
         and in pipelines, whose stages wait less for smaller micro-batches
given    the plan that came in, of the packing plugin; where sequences are few, also the plans of others (`baselines`)

Objective: least predicted seconds of the step among lawful plans; those predicted to fit into the device first. The
degree of a sequence is chosen by the seconds that further ranks save and cost, with memory as a cap only; any number of
ranks, not powers of two. 512 sequences on 64 ranks take about 0.1 s (benchmarks/mesh.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...core.aliases import Ints
from ...core.costs.context import PlanningContext
from ...core.costs.memory import activation_budget_bytes, fixed_bytes
from ...core.errors import EvenloadError, PlanError
from ...core.laws import check
from ...core.plan.limits import Limits
from ...core.plan.step_plan import StepPlan
from ...core.plan.token_layout import tokens_of_ranks
from ...core.planning.stock import UNCAPPED
from ...core.simulate.step import simulate
from .baselines import BASELINES, cp_1
from .bounds import lower_bound_s
from .candidates.host_offload import offloaded
from .candidates.slice_chains import chained
from .candidates.uncut import candidates
from .config import MeshConfig
from .cost_table import LEAST_TOKENS, SequenceCosts, cost_table_of
from .emit.blocks import compute_seconds, fitted, in_blocks
from .emit.step import lengths_of, limits_for, step
from .settings import breaks

_FEW = 4
"""Sequences to a rank up to which all plans of others are judged too: few do not level, and luck decides."""


class _Judged(NamedTuple):
    plan: StepPlan
    step_s: float
    held_bytes: float


def plan(given: StepPlan, context: PlanningContext, config: MeshConfig) -> StepPlan:
    """The plan of the same batch with ranks shared out anew. Raises EvenloadError for what no ranks here can hold."""
    lengths, limits = lengths_of(given), limits_for(given, context, config)
    comes = _under(given, limits)
    if limits.whole_sequences:
        return comes or _on_single_ranks(given, limits, context, config)
    if comes and limits.num_ranks == 1:
        return comes
    if not len(lengths):
        return step(given, limits, [], "mesh")
    cost_table = cost_table_of(context, limits, config, int(lengths.max()))
    anywhere = cost_table.of(lengths)
    shares = anywhere.under(limits.max_tokens)
    found = [_judge(comes, context)] if comes else []
    too_long = not np.isfinite(shares.fastest).all()
    for made in () if too_long else candidates(given, limits, cost_table, anywhere, config):
        found += _judged(made, context)
    if too_long or limits.num_stages > 1:
        room = activation_budget_bytes(context.cluster, context.costs.memory, limits)
        price = context.costs.forward.plus(context.costs.backward)
        ways = sorted(
            chained(lengths, cost_table, limits),
            key=lambda strategy: compute_seconds(strategy, price, limits.num_stages),
        )
        for blocks in ways[: 2 + 2 * config.effort]:
            found += _judged(fitted(in_blocks(given, limits, blocks, "mesh (chains)"), room), context)
    if not found:
        _refuse_longer(lengths, shares, limits)
    for other in _of_others(given, limits, context, config):
        found += _judged(other, context)
    memory = context.costs.memory
    room = activation_budget_bytes(context.cluster, memory, limits) + fixed_bytes(memory, limits)
    if config.offload == "auto" and found and all(one.held_bytes > room for one in found):
        fastest = min(found, key=lambda one: one.step_s)
        for other in offloaded(fastest.plan, context):
            found += _judged(other, context)
    found.sort(key=lambda one: (one.held_bytes > room, one.step_s))
    bound_s = lower_bound_s(lengths, limits, context, config)
    problem: PlanError | None = None
    for one in found:
        try:
            best = check(replace(one.plan, bound_s=bound_s, notes=(*one.plan.notes, *_notes(one, found))))
        except PlanError as error:
            problem = error
            continue
        return replace(best, made_by=_made_by(given, best))
    raise problem or EvenloadError("no way was found to share these sequences out", f"{len(lengths)} sequences")


def _under(given: StepPlan, limits: Limits) -> StepPlan | None:
    """The plan that came in under these limits; None where there is none, or it is over their cap."""
    if not given.micro_batches:
        return None
    most = max(max(tokens_of_ranks(m).values()) for m in (*given.micro_batches, *given.backward))
    if most > limits.max_tokens:
        return None
    return given if given.limits == limits else given.revised(limits=limits)


def _on_single_ranks(given: StepPlan, limits: Limits, context: PlanningContext, config: MeshConfig) -> StepPlan:
    """For hosts that cut and share nothing. Raises EvenloadError for a sequence over a cap that the recipe sets."""
    alone = cp_1(given, context, config)
    if alone.limits.max_tokens == limits.max_tokens:
        return alone
    longest = int(given.lengths.max())
    if config.max_tokens is not None or given.limits.max_tokens < UNCAPPED:
        raise EvenloadError(
            "a sequence is longer than a micro-batch may be, in a loop that runs each on one rank",
            f"{longest} tokens, the cap is {limits.max_tokens}",
            "raise plugins.mesh.max_tokens, or lower data.max_length",
        )
    note = f"mesh: {longest} tokens run at once, {limits.max_tokens} are predicted to fit into the device"
    return alone.revised(notes=(*alone.notes, note))


def _of_others(given: StepPlan, limits: Limits, context: PlanningContext, config: MeshConfig) -> Iterator[StepPlan]:
    """Baselines that keep the settings. With many sequences degrees by memory alone may level best, others never do."""
    few, free = len(given.lengths) <= _FEW * limits.num_ranks, not limits.equal_counts and limits.num_stages == 1
    for name in BASELINES if few else ("memory_degree",) if free else ():
        other = BASELINES[name](given, context, config)
        if other.limits.max_tokens == limits.max_tokens and not breaks(other, config):
            yield replace(other, made_by=f"mesh ({name})")


def _judged(made: StepPlan, context: PlanningContext) -> list[_Judged]:
    """Nothing for a plan whose ranks would wait for each other."""
    try:
        return [_judge(made, context)]
    except PlanError:
        return []


def _judge(made: StepPlan, context: PlanningContext) -> _Judged:
    found = simulate(made, context, record=False)
    return _Judged(made, found.step_s, float(found.peak_bytes.max()))


def _refuse_longer(lengths: Ints, shares: SequenceCosts, limits: Limits) -> None:
    lost = np.flatnonzero(~np.isfinite(shares.fastest))
    if len(lost):
        index = int(lost[lengths[lost].argmax()])
        raise EvenloadError(
            "a sequence is longer than all ranks that may share it can hold",
            f"sequence {index} has {lengths[index]} tokens, the cap of a rank is {limits.max_tokens}, and a slice has "
            f"{LEAST_TOKENS} tokens or more on each of its ranks",
            "raise plugins.mesh.max_tokens or max_degree, allow more cp_comm types, or lower data.max_length",
        )


def _made_by(given: StepPlan, best: StepPlan) -> str:
    if best.made_by.startswith("mesh"):
        return "mesh"
    return f"{given.made_by}, mesh" if given.made_by else "mesh"


def _notes(best: _Judged, found: list[_Judged]) -> list[str]:
    degrees = sorted({len(m.ranks) for m in best.plan.micro_batches if m.slices})
    cp_groups = sorted({len(cp_group) for m in best.plan.micro_batches for cp_group in m.cp_groups})
    ways = sorted({one.plan.made_by for one in found})
    return [
        f"{best.plan.made_by}: micro-batches on {_range(degrees)} ranks"
        + (f", sequences on {_range(cp_groups)}" if cp_groups else ""),
        f"{len(found)} plans were simulated: {', '.join(ways)}",
    ]


def _range(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}" if values else "no"
