"""Which micro-batches of a chain keep their activations, and which are replayed, under a memory cap.

ChunkFlow's rule (arXiv 2503.02356): of a chain of micro-batches that must all run forward before the first runs
backward, the last K keep their activations, the others only prefix KV, and run forward again right before their
backward. K is the largest that the memory model (`core.costs.memory`) allows, for each rank by itself; where ranks must
keep in step (ZeRO-3) it is the same for all.
"""

from __future__ import annotations

from ...core.costs.memory import peaks_of_stage
from ...core.errors import EvenloadError
from ...core.input.format import GIB
from ...core.plan.step_plan import StepPlan
from .assemble import chains_of_rank

_WALKED = 1 << 20
"""Passes of all stages and ranks over which numbers of kept micro-batches are tried; beyond, fewer are kept than may be
in a large plan."""


class ReplayCapError(EvenloadError):
    """No choice of replays brings the plan under the memory cap."""


def fit_memory(plan: StepPlan) -> StepPlan:
    """The plan with as few replays as the cap on activations needs. Raises DoesNotFitError."""
    limits = plan.limits
    if limits.max_activation_bytes == float("inf"):
        return plan
    ranks = range(limits.num_ranks)
    chains = [_chains(plan, rank) for rank in ranks]
    keep = [max(map(len, of_rank), default=1) for of_rank in chains]

    def planned() -> StepPlan:
        replayed = sorted(i for rank in ranks for chain in chains[rank] for i in chain[: -keep[rank]])
        return plan if plan.backward else plan.revised(replayed=tuple(replayed))

    over = _over(plan)
    low, high = dict.fromkeys(over, 1), {rank: keep[rank] for rank in over}
    for rank in over:
        keep[rank] = 1
    if over and (still := _over(planned(), over)):
        _refuse(planned(), still)
    passes = 2 * sum(len(m.ranks) for m in plan.micro_batches) * limits.num_stages
    tries = max(1, _WALKED // max(1, passes))
    while tries and any(low[rank] < high[rank] for rank in over):
        tries -= 1
        for rank in over:
            keep[rank] = (low[rank] + high[rank] + 1) // 2
        still = _over(planned(), over)
        for rank in over:
            if rank in still:
                high[rank] = keep[rank] - 1
            else:
                low[rank] = keep[rank]
    for rank in over:
        keep[rank] = low[rank]
    if limits.all_in_step and over:
        keep = [min(keep)] * limits.num_ranks
    return planned()


def _chains(plan: StepPlan, rank: int) -> list[list[int]]:
    """Micro-batches that wait for each other. Ranks in step run all their forwards first, as one chain."""
    if plan.backward or not plan.order:
        return []
    if plan.limits.all_in_step:
        return [list(plan.of_rank(rank))]
    return [chain for chain in chains_of_rank(plan, rank) if len(chain) > 1]


def _over(plan: StepPlan, among: list[int] | None = None) -> list[int]:
    """The ranks that hold more than the cap; only ``among`` these, if given."""
    cap, ranks = plan.limits.max_activation_bytes, range(plan.limits.num_ranks) if among is None else among
    peaks = [peaks_of_stage(plan, stage, ranks) for stage in range(plan.limits.num_stages)]
    return [rank for rank, *held in zip(ranks, *peaks, strict=True) if any(peak > cap for peak, _ in held)]


def _refuse(plan: StepPlan, over: list[int]) -> None:
    limits = plan.limits
    peaks = {stage: peaks_of_stage(plan, stage, over) for stage in range(limits.num_stages)}
    peak, stage, rank = max((p, s, r) for s, row in peaks.items() for r, (p, _) in zip(over, row, strict=True))
    lengths, memory = plan.lengths.tolist(), limits.memory
    own = {s.sequence for i in plan.of_rank(rank) for s in plan.micro_batches[i].slices}
    longest = max((lengths[i] for i in own), default=0)
    kv = longest * (memory.kv_bytes_per_token + memory.kv_grad_bytes_per_token) if own & plan.cut else 0.0
    tokens = max(plan.micro_batches[i].num_padded_tokens for i in plan.of_rank(rank))
    alive = tokens * memory.activation_bytes_per_token
    cap = limits.max_activation_bytes
    what, do = "what a rank must keep", "raise plugins.packing.activation_gib, or lower plugins.packing.max_tokens"
    if kv > cap:
        what = "the keys and values of a sequence"
        do = (
            "raise plugins.packing.activation_gib, shorten the samples (data.max_length), or use more tensor or "
            "pipeline parallelism"
        )
    raise ReplayCapError(
        f"plugins.packing.activation_gib cannot hold {what}",
        f"rank {rank} of stage {stage} needs {peak / GIB:.3g} GiB at the least ({kv / GIB:.3g} for K, V and their "
        f"gradients of {longest} tokens, {alive / GIB:.3g} for {tokens} tokens in one micro-batch), the cap is "
        f"{cap / GIB:.3g}",
        do,
    )
