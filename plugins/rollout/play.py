"""Plays rollouts: slots, caps and decode steps of ranks, for lengths that are known. All seconds are predicted.

A rank lets a sample in while it has a slot and room for the keys that its samples have and may get (``reserve``). Where
the keys of a step would not fit all the same, the sample that came last goes back, keeps its tokens, and nobody comes
in before a sample has ended; its keys are computed again then. Tokens do not depend on any of it. The clock of a rank
jumps from event to event (an end, an arrival, a full store): O(log) each, 8,192 samples on 64 ranks in 0.1 s.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.errors import refuse_first
from .costs import RolloutCosts
from .plan import RolloutPlan, RolloutRequest


class WaitingSamples(Protocol):
    """Samples of a rank that wait for a slot."""

    def __len__(self) -> int: ...
    def enter(self, sample: int, now_s: float) -> None: ...
    def first(self) -> int: ...
    def pop(self) -> int: ...


class InOrder:
    """Samples that wait in the order of a plan, or in which they come."""

    def __init__(self, samples: Iterable[int] = ()) -> None:
        self._samples = deque(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def enter(self, sample: int, now_s: float) -> None:
        """Let a sample wait until all others have run."""
        self._samples.append(sample)

    def first(self) -> int:
        """The sample that is next; it stays where it is."""
        return self._samples[0]

    def pop(self) -> int:
        """Take the sample that is next."""
        return self._samples.popleft()


class PlayedRollout(NamedTuple):
    """What a rollout comes to."""

    end_s: Floats
    """When each sample ended [S]; NaN: it is carried on."""
    tokens: Ints
    """Tokens that each sample has [S]."""
    rank_s: Floats
    """When each rank was done [R]."""
    most_keys: Ints
    """Keys that each rank held at most [R]."""
    num_evicted: int
    """Times that a sample went back."""


@dataclass(frozen=True)
class Rollout:
    """Samples whose lengths are known, on ranks of given costs."""

    request: RolloutRequest
    lengths: Ints
    """Tokens with which each sample ends [S]."""
    costs: RolloutCosts
    reserve: Ints | None = None
    """Tokens for which each sample's keys have room when it is let in [S]; None: the limit, so that none goes back."""

    def __post_init__(self) -> None:
        low, high = np.min(self.lengths - self.request.done), np.max(self.lengths)
        odd = len(self.lengths) != len(self.request.prompts) or low < 1 or high > self.request.limit
        refuse_first((bool(odd), "lengths are not those of the samples", f"{low} to {high}", "give one a sample"))

    def play(self, plan: RolloutPlan, most_steps: int | Ints | None = None) -> PlayedRollout:
        """All ranks by a plan, all or each for ``most_steps`` decode steps at most; seconds count from its start."""
        count, num_ranks = len(self.lengths), self.request.num_ranks
        played = _nothing(count, num_ranks, self.request.done)
        evicted, most = 0, np.broadcast_to(math.inf if most_steps is None else most_steps, num_ranks)
        for rank, own in enumerate(plan.ranks):
            clock = _Clock(self, InOrder(own.tolist()), played)
            clock.run(float(most[rank]))
            played.rank_s[rank], played.most_keys[rank] = clock.now_s, clock.most_keys
            evicted += clock.num_evicted
        return played._replace(num_evicted=evicted)

    def serve(self, waiting: WaitingSamples, arrivals_s: Floats) -> PlayedRollout:
        """One rank, to which samples come at ``arrivals_s`` [S] and wait in a queue."""
        played = _nothing(len(self.lengths), 1, self.request.done)
        order = np.argsort(arrivals_s, kind="stable").tolist()
        clock = _Clock(self, waiting, played, deque((float(arrivals_s[sample]), sample) for sample in order))
        clock.run(math.inf)
        played.rank_s[0], played.most_keys[0] = clock.now_s, clock.most_keys
        return played._replace(num_evicted=clock.num_evicted)


def _nothing(count: int, num_ranks: int, done: Ints) -> PlayedRollout:
    keys = np.zeros(num_ranks, np.int64)
    return PlayedRollout(np.full(count, np.nan), done.copy(), np.zeros(num_ranks), keys, 0)


class _Clock:
    """One rank while it plays; writes the ends and tokens of its samples."""

    def __init__(
        self,
        rollout: Rollout,
        waiting: WaitingSamples,
        played: PlayedRollout,
        arrivals: deque[tuple[float, int]] | None = None,
    ) -> None:
        self._of = rollout
        self._waiting = waiting
        self._played = played
        self._arrivals = arrivals or deque()
        self._back: deque[int] = deque()
        self._live: dict[int, int] = {}
        """Samples in the order in which they came in, each with the step at which its first token would have been."""
        self._ends: list[tuple[int, int]] = []
        self._step = 0
        self._keys = 0
        self._reserved = 0
        self._open = True
        self.now_s = 0.0
        self.most_keys = self.num_evicted = 0

    def run(self, most_steps: float) -> None:
        """Play until all have ended, or for so many steps."""
        while self._step < most_steps:
            self._take_arrivals()
            self._let_in()
            if not self._live and not self._arrivals:
                break
            if not self._live:
                self.now_s = self._arrivals[0][0]
                continue
            self._send_back()
            self._advance(most_steps)
            self._end()
        for sample, first in self._live.items():
            self._played.tokens[sample] = self._step - first

    def _take_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now_s:
            arrival_s, sample = self._arrivals.popleft()
            self._waiting.enter(sample, arrival_s)

    def _let_in(self) -> None:
        request = self._of.request
        while self._open and len(self._live) < request.slots and (self._back or len(self._waiting)):
            sample = self._back[0] if self._back else self._waiting.first()
            prompt, tokens = self._prompt(sample), int(self._played.tokens[sample])
            held = max(self._keys, self._reserved)
            if self._live and held + self._reserve(sample, tokens) > request.cap_tokens:
                break
            _ = self._back.popleft() if self._back else self._waiting.pop()
            self._reserved += self._reserve(sample, 0)
            self._keys += prompt + tokens
            self.now_s += self._of.costs.prompt_s * (prompt + tokens)
            self._live[sample] = self._step - tokens
            heapq.heappush(self._ends, (self._step - tokens + int(self._of.lengths[sample]), sample))

    def _prompt(self, sample: int) -> int:
        return int(self._of.request.prompt_tokens[self._of.request.prompts[sample]])

    def _reserve(self, sample: int, tokens: int) -> int:
        """Keys for which there must be room, prompt included."""
        reserve = self._of.request.limit if self._of.reserve is None else int(self._of.reserve[sample])
        return self._prompt(sample) + max(reserve, tokens + 1)

    def _send_back(self) -> None:
        """Make room for the keys of the next step."""
        while self._keys + len(self._live) > self._of.request.cap_tokens:
            sample, first = self._live.popitem()
            self._played.tokens[sample] = self._step - first
            self._keys -= self._prompt(sample) + self._step - first
            self._reserved -= self._reserve(sample, 0)
            self._ends = [end for end in self._ends if end[1] != sample]
            heapq.heapify(self._ends)
            self._back.appendleft(sample)
            self._open = False
            self.num_evicted += 1

    def _advance(self, most_steps: float) -> None:
        """As many steps as nothing happens in."""
        rows, costs = len(self._live), self._of.costs
        steps = min(self._ends[0][0] - self._step, (self._of.request.cap_tokens - self._keys) // rows)
        if self._arrivals and rows < self._of.request.slots and self._open:
            steps = min(steps, self._steps_until(self._arrivals[0][0] - self.now_s))
        steps = int(min(steps, most_steps - self._step))
        self.now_s += costs.steps_s(steps, rows, self._keys)
        self._keys += steps * rows
        self._step += steps
        self.most_keys = max(self.most_keys, self._keys)

    def _steps_until(self, seconds: float) -> int:
        """The fewest steps that take so long."""
        rows, costs = len(self._live), self._of.costs
        square = costs.key_s * rows / 2
        linear = costs.step_s + costs.row_s * rows + costs.key_s * self._keys - square
        return max(1, math.ceil(2 * seconds / (linear + math.sqrt(linear**2 + 4 * square * seconds))))

    def _end(self) -> None:
        while self._ends and self._ends[0][0] <= self._step:
            _, sample = heapq.heappop(self._ends)
            tokens = self._step - self._live.pop(sample)
            self._played.tokens[sample], self._played.end_s[sample] = tokens, self.now_s
            self._keys -= self._prompt(sample) + tokens
            self._reserved -= self._reserve(sample, 0)
            self._open = True
