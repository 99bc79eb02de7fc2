"""What a rollout asks for, which rank generates which of its samples in which order, and below what time none ends.

The bound is that of any dealing whatever, with moves at any step for nothing:  max(longest sample alone, all work / R),
a step's own seconds shared by as many samples as there are slots. Nothing here decides a token: a plan says where and
when tokens are drawn.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...core.aliases import Ints
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
