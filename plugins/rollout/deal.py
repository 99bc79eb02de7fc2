"""Deals the samples of a rollout to ranks by what is expected of them.

    tie      the sample of most expected seconds goes to the rank with the least so far (longest processing time first),
             at most ceil(G / R) of the G samples of a prompt to a rank: what is not known of it hits all alike
    spread   sample i to rank i mod R: what is done where nothing is known, or where planning fails

A rank starts its samples least expected tokens first where they are used as they come. Where the step waits for all,
and ranks have more samples than slots, largest tail first is played as well on some ranks, for one drawing of
lengths, and the order whose ranks end earlier is taken: what is known of a prompt says little of its longest sample,
and largest first pays only where it says much. O(S log S); CPU time of 8,192 samples on 64 ranks: 5 ms, with 64 slots
each 15 ms.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.errors import PlanError
from .costs import H100_7B, RolloutCosts
from .lengths import LengthDistributions
from .plan import RolloutPlan, RolloutRequest, check_rollout, spread
from .play import Rollout
from .score import Expected, expected, likely_lengths

log = logging.getLogger("evenload")

Waits = Literal["all", "each"]
"""Whether the step waits for all samples, or uses each as it comes."""
_JUDGED = 8
"""Ranks on which orders are played."""


def plan_rollout(
    request: RolloutRequest,
    distributions: LengthDistributions | None = None,
    costs: RolloutCosts = H100_7B,
    waits_for: Waits = "all",
) -> RolloutPlan:
    """The checked plan of a rollout for any engine, the same on every rank.

    ``distributions``: of the request's prompts; None: samples are spread. What fails falls back to spreading, and says
    so in a warning.
    """
    if distributions is not None:
        try:
            return check_rollout(tie_plan(request, distributions, costs, waits_for), request)
        except Exception as error:
            log.warning("the rollout is spread over ranks, as planning it failed: %s: %s", type(error).__name__, error)
    return check_rollout(spread(request), request)


def tie_plan(
    request: RolloutRequest, distributions: LengthDistributions, costs: RolloutCosts, waits_for: Waits = "all"
) -> RolloutPlan:
    """What `plan_rollout` checks, without its fallback: for ranks that fall back together."""
    if distributions.limits.max() > request.limit or len(distributions.mu) != len(request.prompt_tokens):
        what = f"{len(distributions.mu)} prompts up to {distributions.limit}"
        raise PlanError("distributions are of other prompts or another limit", what, "fit them for this request")
    lengths = expected(distributions, request.prompts, request.done)
    ranks = _longest_first(left_s(lengths, request, costs), request)
    order = np.argsort(lengths.mean - request.done, kind="stable")
    if waits_for == "all":
        order = min((order, np.argsort(-lengths.tail, kind="stable")), key=_judge(request, distributions, costs, ranks))
    starts = order[np.argsort(ranks[order], kind="stable")]
    borders = np.cumsum(np.bincount(ranks, minlength=request.num_ranks))[:-1]
    return RolloutPlan(tuple(np.split(starts, borders)), "tie")


def _longest_first(seconds: Floats, request: RolloutRequest) -> Ints:
    """Rank of each sample [S]: the costliest first, to the rank with the least seconds that may have it."""
    sizes = np.bincount(request.prompts)
    left = np.repeat(-(-sizes[:, None] // request.num_ranks), request.num_ranks, axis=1).tolist()
    prompts, values = request.prompts.tolist(), seconds.tolist()
    heap = [(0.0, rank) for rank in range(request.num_ranks)]
    ranks = np.zeros(len(values), np.int64)
    for sample in np.argsort(-seconds, kind="stable").tolist():
        full = []
        own = left[prompts[sample]]
        while not own[heap[0][1]]:
            full.append(heapq.heappop(heap))
        load, rank = heap[0]
        own[rank] -= 1
        ranks[sample] = rank
        heapq.heapreplace(heap, (load + values[sample], rank))
        for one in full:
            heapq.heappush(heap, one)
    return ranks


def left_s(lengths: Expected, request: RolloutRequest, costs: RolloutCosts) -> Floats:
    """Expected seconds of the tokens that each sample has yet to get, with its share of a step of full slots."""
    done, prompts = request.done.astype(np.float64), request.prompt_tokens[request.prompts].astype(np.float64)
    work_s = costs.work_s(prompts, lengths.mean, lengths.squares) - costs.work_s(prompts, done, done**2)
    return np.asarray(work_s + costs.step_s / request.slots * (lengths.mean - done))


def _judge(
    request: RolloutRequest, distributions: LengthDistributions, costs: RolloutCosts, ranks: Ints
) -> Callable[[Ints], float]:
    """Mean predicted end of some ranks by an order of all samples; nothing where all samples have a slot at once."""
    few = min(_JUDGED, request.num_ranks)
    if np.bincount(ranks).max() <= request.slots:
        return lambda order: 0.0
    own = np.flatnonzero(ranks < few)
    part = replace(request, prompts=request.prompts[own], done=request.done[own], num_ranks=few)
    rollout = Rollout(part, likely_lengths(distributions, part.prompts, part.done), costs)
    places = np.zeros(len(ranks), np.int64)
    places[own] = np.arange(len(own))

    def end_s(order: Ints) -> float:
        starts = tuple(places[order[ranks[order] == rank]] for rank in range(few))
        return float(rollout.play(RolloutPlan(starts, "judged")).rank_s.max())

    return end_s
