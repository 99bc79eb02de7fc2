"""Which rank generates which samples, in which order, and how far from the best that is.

    tie      the sample of most expected seconds goes to the rank with the least so far (longest processing time first),
             at most ceil(G / R) of the G samples of a prompt to a rank: what is not known of it befalls all alike
    spread   sample i to rank i mod R: what is done where nothing is known, or where planning fails

A rank starts its samples in that order, largest tail first, where the step waits for all; least expected tokens first
where samples are used as they come. Nothing here decides a token: a plan says where and when tokens are drawn.

The bound is that of any dealing whatever, with moves at any step for nothing:  max(longest sample alone, all work / R),
a step's own seconds shared by as many samples as there are slots. O(S log S): 8,192 samples on 64 ranks in 15 ms.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.errors import PlanError, refuse_first
from .costs import H100_7B, RolloutCosts
from .lengths import LengthDistributions
from .score import Expected, expected

log = logging.getLogger("evenload")

Waits = Literal["all", "each"]
"""Whether the step waits for all samples, or uses each as it comes."""


@dataclass(frozen=True)
class RolloutRequest:
    """Samples to generate and what ranks have room for. Raises EvenloadError where a rank cannot hold one sample."""

    prompts: Ints
    """Number of each sample's prompt [S]."""
    prompt_tokens: Ints
    """Tokens of each prompt [P]."""
    num_ranks: int
    limit: int
    """Tokens after which a sample is cut."""
    slots: int
    """Samples that a rank decodes at once."""
    cap_tokens: int
    """Keys that a rank holds at most, those of prompts among them."""
    done: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens that each sample has already [S]; empty: none."""

    def __post_init__(self) -> None:
        prompts, tokens = np.asarray(self.prompts, np.int64), np.asarray(self.prompt_tokens, np.int64)
        done = np.asarray(self.done, np.int64) if len(self.done) else np.zeros(len(prompts), np.int64)
        for name, value in (("prompts", prompts), ("prompt_tokens", tokens), ("done", done)):
            object.__setattr__(self, name, value)
        least = int(tokens.max(initial=0)) + self.limit
        refuse_first(
            (not len(prompts), "there is no sample to generate", "no prompts", "give one or more"),
            (min(self.num_ranks, self.limit, self.slots) < 1, "ranks, limit or slots are below 1", f"{self}", "give 1"),
            (
                bool(prompts.min(initial=0) < 0 or prompts.max(initial=0) >= len(tokens) or tokens.min(initial=1) < 1),
                "a sample is of no prompt, or a prompt has no token",
                f"{len(tokens)} prompts",
                "number prompts from 0, and give the tokens of each",
            ),
            (
                done.shape != prompts.shape or bool(done.min(initial=0) < 0 or done.max(initial=0) >= self.limit),
                "tokens that samples have already are no numbers below the limit",
                f"{done.shape}",
                "leave out samples that have ended",
            ),
            (
                self.cap_tokens < least,
                "a rank has no room for the keys of one sample",
                f"cap_tokens {self.cap_tokens}, the longest prompt and the limit are {least} tokens",
                "raise the cap, lower the limit, or leave out long prompts",
            ),
        )


@dataclass(frozen=True)
class RolloutPlan:
    """Which samples each rank generates, in the order in which it starts them."""

    ranks: tuple[Ints, ...]
    planner: str

    @property
    def digest(self) -> bytes:
        """16 bytes that ranks compare before they use a plan."""
        digest = hashlib.blake2b(repr([len(own) for own in self.ranks]).encode(), digest_size=16)
        for own in self.ranks:
            digest.update(own.astype("<i8").tobytes())
        return digest.digest()


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
            return check_rollout(_dealt(request, distributions, costs, waits_for), request)
        except Exception as error:
            log.warning("the rollout is spread over ranks, as planning it failed: %s: %s", type(error).__name__, error)
    return check_rollout(spread(request), request)


def spread(request: RolloutRequest) -> RolloutPlan:
    """Samples dealt in turn, in the order in which they are asked for."""
    samples = np.arange(len(request.prompts))
    return RolloutPlan(tuple(samples[rank :: request.num_ranks] for rank in range(request.num_ranks)), "spread")


def _dealt(
    request: RolloutRequest, distributions: LengthDistributions, costs: RolloutCosts, waits_for: Waits
) -> RolloutPlan:
    if distributions.limit != request.limit or len(distributions.mu) != len(request.prompt_tokens):
        what = f"{len(distributions.mu)} prompts up to {distributions.limit}"
        raise PlanError("distributions are of other prompts or another limit", what, "fit them for this request")
    lengths = expected(distributions, request.prompts, request.done)
    seconds = left_s(lengths, request, costs)
    ranks = _longest_first(seconds, request)
    order = np.argsort(-lengths.tail, kind="stable")
    if waits_for == "each":
        order = np.argsort(lengths.mean - request.done, kind="stable")
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


def check_rollout(plan: RolloutPlan, request: RolloutRequest) -> RolloutPlan:
    """The plan, if each sample is on one rank once. Raises PlanError."""
    samples = np.concatenate([np.zeros(0, np.int64), *plan.ranks])
    whole = len(plan.ranks) == request.num_ranks and np.array_equal(np.sort(samples), np.arange(len(request.prompts)))
    if not whole:
        detail = f"{len(samples)} of {len(request.prompts)} samples on {len(plan.ranks)} of {request.num_ranks} ranks"
        raise PlanError("a rollout loses or repeats samples, or ranks", detail, "deal each sample to one rank")
    return plan


class RolloutBound(NamedTuple):
    """Below this no rollout of these samples ends, however they are dealt or moved."""

    longest_s: float
    """Of the costliest sample, alone on a rank."""
    shared_s: float
    """All work over the ranks."""

    @property
    def bound_s(self) -> float:
        """The larger of the two."""
        return max(self)


def bound_of(request: RolloutRequest, lengths: Ints, costs: RolloutCosts) -> RolloutBound:
    """The bound for samples that turn out to have ``lengths`` [S], from their first token on."""
    tokens, prompts = np.asarray(lengths, np.float64), request.prompt_tokens[request.prompts].astype(np.float64)
    work_s = costs.work_s(prompts, tokens, tokens**2)
    shared_s = float(work_s.sum() + costs.step_s / request.slots * tokens.sum()) / request.num_ranks
    return RolloutBound(float((work_s + costs.step_s * tokens).max()), shared_s)
