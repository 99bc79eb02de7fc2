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
costliest does. O(N^2 n) for n chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.memory import room_bytes
from ...core.parts import tokens_of_ranks
from ...core.predict import own_costs
from ...core.registry import Situation
from ...core.workload import StepPlan
from .config import PipelineConfig

_IMPOSSIBLE = 100.0


@dataclass(frozen=True)
class _Chunk:
    """A micro-batch on one rank."""

    number: int
    both_s: float
    layers_s: float
    """Forward seconds of all layers of a stage."""
    tokens: float


def grouped(plan: StepPlan, situation: Situation, config: PipelineConfig) -> list[list[int]]:
    """Numbers of the micro-batches of each pipeline, in launch order; the pipeline of most chunks first.

    ``plan`` needs no order. ``config.recompute`` off: nothing can be recomputed, what does not fit is charged in full.
    """
    counts = _chunk_counts(plan)
    steps = sorted(set(counts))
    ranks = _chunks_of_ranks(plan, situation)
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(steps) + 1):
        options = [
            (best[begin][0] + _pipeline_s(plan, situation, config, ranks, counts, steps[begin:end]), begin)
            for begin in range(end)
        ]
        best.append(min(options))
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
    pipeline = list(range(len(plan.micro_batches)))
    chunks: dict[int, list[int]] = {}
    for number, m in enumerate(plan.micro_batches):
        for s in m.slices:
            if s.sequence in plan.cut:
                chunks.setdefault(s.sequence, []).append(number)
    counts = [1] * len(pipeline)
    for numbers in chunks.values():
        joining = {pipeline[i] for i in numbers}
        most = max(len(numbers), *(counts[i] for i in joining))
        first = min(joining)
        pipeline = [first if one in joining else one for one in pipeline]
        counts[first] = most
    return [counts[one] for one in pipeline]


def _chunks_of_ranks(plan: StepPlan, situation: Situation) -> list[list[_Chunk]]:
    costs = own_costs(plan, situation.costs)
    rows: list[list[_Chunk]] = [[] for _ in range(plan.limits.num_ranks)]
    for number, m in enumerate(plan.micro_batches):
        both_s, layers_s = sum(costs.micro_batch_s(m)), costs.layers_s(m, situation.head_frac)
        for rank, tokens in tokens_of_ranks(m).items():
            rows[rank].append(_Chunk(number, both_s, layers_s, float(tokens)))
    return rows


def _pipeline_s(
    plan: StepPlan,
    situation: Situation,
    config: PipelineConfig,
    ranks: list[list[_Chunk]],
    counts: list[int],
    steps: Sequence[int],
) -> float:
    """Seconds that a pipeline of the chunks of these counts takes beyond its work, on the rank where that is most."""
    wanted = frozenset(steps)
    mine = [[chunk for chunk in row if counts[chunk.number] in wanted] for row in ranks]
    return max((_beyond_work_s(plan, situation, config, row, steps[-1]) for row in mine if row), default=0.0)


def _beyond_work_s(plan: StepPlan, situation: Situation, config: PipelineConfig, row: list[_Chunk], most: int) -> float:
    limits = plan.limits
    stages, layers = limits.num_stages, limits.layers_per_stage
    filling_s = (stages - 1) * float(np.mean([chunk.both_s for chunk in row]))
    tokens = float(np.mean([chunk.tokens for chunk in row]))
    per_token = limits.replay_bytes_per_token or limits.activation_bytes_per_token
    saves = tokens * max(0.0, per_token - limits.input_bytes_per_token)
    prefix = most * tokens * (limits.kv_bytes_per_token + limits.kv_grad_bytes_per_token) * layers if most > 1 else 0.0
    room = room_bytes(situation.cluster, situation.costs.memory, limits)
    needed = 0.0
    for stage in range(stages):
        in_flight = min(len(row), most + stages - 1 - stage)
        head = limits.beside.head_bytes_per_token if stage == stages - 1 else 0.0
        over = in_flight * tokens * (per_token * layers + head) + prefix - room
        needed = max(needed, over / (in_flight * saves) if saves else 0.0)
    can_be = layers if config.recompute == "auto" else 0
    charged = min(needed, can_be) + _IMPOSSIBLE * max(0.0, needed - can_be)
    return filling_s + charged / layers * sum(chunk.layers_s for chunk in row)
