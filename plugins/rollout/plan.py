"""What a rollout asks for, which rank generates which of its samples in which order, and below what time none ends.

The bound is that of any dealing whatever, with moves at any step for nothing, by who knows all lengths: the largest of

    longest    the costliest sample alone on a rank
    shared     W / R: all work, a step's own seconds t0 shared by as many samples as there are slots
    crowded    the T at which  R T = W + t0 sum_i z_i^2 / (T - t0 l_i),    z_i = sum over its l_i tokens of sqrt(c)

c is what a token takes above t0: row_s + key_s * keys. A sample of l tokens has T - t0 l left for all that is computed
in its steps, so these have few samples, which share t0. Proof by weak duality: let a rank's second cost m and one of
sample i w_i, R m + sum w_i = 1. All steps cost at most T, and one of samples A, with C and w their sums, costs
(t0 + C)(m + w) >= t0 w + m C + 2 sqrt(t0 m C w) >= ... + 2 sqrt(t0 m) sum over A of sqrt(c w_i) (Cauchy-Schwarz); the
best m and w give the equation. Samples that are all alike reach it. Nothing here decides a token: a plan says where and
when tokens are drawn.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.errors import PlanError, refuse_first
from .costs import RolloutCosts


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
                "tokens that samples have already are not numbers below the limit",
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
    def of_samples(self) -> Ints:
        """The rank of each sample [S]."""
        ranks = np.zeros(sum(map(len, self.ranks)), np.int64)
        for rank, own in enumerate(self.ranks):
            ranks[own] = rank
        return ranks

    @property
    def digest(self) -> bytes:
        """16 bytes that ranks compare before they use a plan."""
        digest = hashlib.blake2b(repr([len(own) for own in self.ranks]).encode(), digest_size=16)
        for own in self.ranks:
            digest.update(own.astype("<i8").tobytes())
        return digest.digest()


def spread(request: RolloutRequest) -> RolloutPlan:
    """Samples dealt in turn, in the order in which they are asked for."""
    samples = np.arange(len(request.prompts))
    return RolloutPlan(tuple(samples[rank :: request.num_ranks] for rank in range(request.num_ranks)), "spread")


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
    """All work over the ranks, with full slots."""
    crowded_s: float
    """All work over the ranks, with as few samples in a step as let the long ones end in time."""

    @property
    def bound_s(self) -> float:
        """The largest of these times."""
        return max(self)


def bound_of(request: RolloutRequest, lengths: Ints, costs: RolloutCosts) -> RolloutBound:
    """The bound for samples that turn out to have ``lengths`` [S], from their first token on. A prompt that several
    have is computed once."""
    tokens, prompts = np.asarray(lengths, np.float64), request.prompt_tokens[request.prompts].astype(np.float64)
    each_s = costs._replace(prompt_s=0.0).work_s(prompts, tokens, tokens**2)
    work_s = float(each_s.sum()) + costs.prompt_s * float(request.prompt_tokens[np.unique(request.prompts)].sum())
    shared_s = (work_s + costs.step_s / request.slots * float(tokens.sum())) / request.num_ranks
    longest_s = float((each_s + costs.prompt_s * prompts + costs.step_s * tokens).max())
    return RolloutBound(longest_s, shared_s, _crowded_s(request.num_ranks, work_s, prompts, tokens, costs))


def _crowded_s(num_ranks: int, work_s: float, prompts: Floats, tokens: Floats, costs: RolloutCosts) -> float:
    first, last = (costs.row_s + costs.key_s * keys for keys in (prompts, prompts + tokens - 1))
    # The least that a sum of growing values can be: the first one, and the integral over the others.
    areas = (last**1.5 - first**1.5) / (1.5 * costs.key_s) if costs.key_s else np.sqrt(first) * (tokens - 1)
    squares = costs.step_s * (np.sqrt(first) + areas) ** 2
    low = max(costs.step_s * float(tokens.max()), work_s / num_ranks)
    high = costs.step_s * float(tokens.max()) + work_s / num_ranks + float(np.sqrt(squares.sum() / num_ranks))
    for _ in range(60):
        middle = (low + high) / 2
        alone = middle - costs.step_s * tokens
        missing = work_s + float((squares / np.maximum(alone, 1e-300)).sum()) > num_ranks * middle
        low, high = (middle, high) if missing else (low, middle)
    return low
