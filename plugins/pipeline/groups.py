"""Which chunks form one pipeline, where pipelines are drained between them (InfiniPipe's sequence grouping).

InfiniPipe, arXiv 2509.21275, section IV, Eq. 13-14. Sequences by ascending number of chunks, in runs of neighbours:

    dp[i + 1] = min_{k <= i}  dp[k] + delta + T_ckpt(sequences of k+1 .. i+1 chunks)

    delta   (P - 1) * mean seconds of a chunk, both directions: filling and draining a pipeline of P stages
    T_ckpt  seconds of recomputation in it

A pipeline whose longest sequence has N chunks holds w_p = N + P - 1 - p of them at stage p. If a layer of a chunk saves
s_p bytes, these fit when the mean chunk recomputes

    c_p = (w_p * bytes of a chunk + K and V of the longest sequence - room) / (w_p * s_p)      layers,

and where chunks are alike nothing recomputes less than all of them so many. Hence T_ckpt = max_p c_p * seconds of a
layer of all its chunks, in place of an integer program for each of the O(N^2) runs. What c_p exceeds the layers of a
stage by cannot be had, and is charged a hundred times. On several ranks a run is a pipeline on each, and costs what the
costliest does. O(N^2 + n) for n chunks.
"""

from __future__ import annotations

import numpy as np

from ...core.aliases import Floats
from ...core.balance.joined import Joined
from ...core.costs.context import PlanningContext
from ...core.costs.memory import activation_budget_bytes
from ...core.plan.step_plan import StepPlan
from ...core.plan.token_layout import tokens_of_ranks
from ...core.simulate.predict import own_costs
from .config import PipelineConfig

_IMPOSSIBLE = 100.0


def grouped(plan: StepPlan, context: PlanningContext, config: PipelineConfig) -> list[list[int]]:
    """Numbers of the micro-batches of each pipeline, in launch order; the pipeline of most chunks first.

    ``plan`` needs no order. ``config.recompute`` off: nothing can be recomputed, what does not fit is charged in full.
    """
    counts = _chunk_counts(plan)
    steps = sorted(set(counts))
    sums = _sums(plan, context, counts, steps)
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(steps) + 1):
        apart_s = _beyond_work_s(plan, context, config, sums[end] - sums[:end], steps[end - 1]).tolist()
        best.append(min((best[begin][0] + apart_s[begin], begin) for begin in range(end)))
    groups: list[list[int]] = []
    end = len(steps)
    while end:
        begin = best[end][1]
        chosen = set(steps[begin:end])
        groups.append([i for i, count in enumerate(counts) if count in chosen])
        end = begin
    return groups


def _chunk_counts(plan: StepPlan) -> list[int]:
    """For each micro-batch the most chunks of a sequence among those that must be in one pipeline with it."""
    joined = Joined(len(plan.micro_batches))
    chunks: dict[int, list[int]] = {}
    for number, m in enumerate(plan.micro_batches):
        for s in m.slices:
            if s.sequence in plan.cut:
                chunks.setdefault(s.sequence, []).append(number)
    counts = [1] * len(plan.micro_batches)
    for numbers in chunks.values():
        most = max(len(numbers), *(counts[joined.first(i)] for i in numbers))
        counts[joined.join(numbers)] = most
    return [counts[joined.first(i)] for i in range(len(counts))]


def _sums(plan: StepPlan, context: PlanningContext, counts: list[int], steps: list[int]) -> Floats:
    """Sums over the chunks of the first n of these counts, by rank: [n, ranks, (number, both_s, layers_s, tokens)]."""
    costs, place = own_costs(plan, context.costs), {count: n for n, count in enumerate(steps, 1)}
    sums = np.zeros((len(steps) + 1, plan.limits.num_ranks, 4))
    for m, count in zip(plan.micro_batches, counts, strict=True):
        both_s, layers_s = sum(costs.micro_batch_s(m)), costs.layers_s(m, context.head_frac)
        for rank, tokens in tokens_of_ranks(m).items():
            sums[place[count], rank] += 1, both_s, layers_s, tokens
    return sums.cumsum(axis=0)


def _beyond_work_s(plan: StepPlan, context: PlanningContext, config: PipelineConfig, sums: Floats, most: int) -> Floats:
    """Seconds that pipelines take beyond their work, on the rank where that is most [pipelines]. ``sums`` of their
    chunks [pipelines, ranks, 4], as `_sums`; ``most`` chunks of their longest sequence."""
    limits = plan.limits
    stages, layers = limits.num_stages, limits.mean_layers
    number, both_s, layers_s, tokens = np.moveaxis(sums, -1, 0)
    mean = 1 / np.maximum(number, 1)
    budget_bytes = activation_budget_bytes(context.cluster, context.costs.memory, limits)
    needed = np.zeros_like(number)
    for stage in range(stages):
        memory = limits.at(stage).memory
        per_token = memory.replay_bytes_per_token or memory.activation_bytes_per_token
        own = limits.at(stage).layers_per_stage
        saves = mean * tokens * max(0.0, per_token / own - memory.input_bytes_per_token)
        kv = memory.kv_bytes_per_token + memory.kv_grad_bytes_per_token if most > 1 else 0.0
        in_flight = np.minimum(number, most + stages - 1 - stage)
        head = memory.head_bytes_per_token if stage == stages - 1 else 0.0
        over = mean * tokens * (in_flight * (per_token + head) + most * kv) - budget_bytes
        can_save = in_flight * saves
        needed = np.maximum(needed, np.divide(over, can_save, out=np.zeros_like(over), where=can_save > 0))
    can_be = layers if config.recompute == "auto" else 0
    charged = np.minimum(needed, can_be) + _IMPOSSIBLE * np.maximum(0.0, needed - can_be)
    beyond: Floats = (stages - 1) * mean * both_s + charged / layers * layers_s
    result: Floats = np.where(number > 0, beyond, 0.0).max(axis=1)
    return result
