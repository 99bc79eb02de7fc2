"""What plain generation gives, and whether a sample of a host is the same: a forward of the whole sequence for each
token, sample by sample, by the integration's `PlainModel` and `textbook_sampling`.

Samples are taken to their limits once; end tokens and stop strings cut them afterwards, for what a token is does not
depend on them. In float32 a sample may take another token where two lie within rounding of each other, or of a border
of top-k or top-p: from there on it is compared with forwards of its own tokens, and such flips are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...core.aliases import Floats
from ...integrations.reference.textbook_sampling import log_probs, noise, scores
from ...runtime.generate.request import Completion, Ended, Generation, Request
from ...runtime.world.agreement import everyone

TIES = {"fp64": 0.0, "fp32": 1e-4}
"""How near two scores are that rounding may put in another order, by the precision of a run."""
Key = tuple[int, int]
"""Prompt and sample, by their numbers."""


class SampleVerdict(NamedTuple):
    """A sample of a host against plain generation."""

    fault: str = ""
    """In words, what cannot be rounding."""
    flips: int = 0
    error: float = 0.0
    """The largest of its log-probabilities."""


class PlainSamples:
    """The samples of some requests. Making it is collective, and so is judging a sample: all ranks judge the same.

    Args:
        plain: a `PlainModel` with the host's weights.
        adapted: gives it the adapter of a tenant, None: none; for requests that have tenants.
        settings: the seed, the rule of drawing, and the recipe's own ends.
    """

    def __init__(
        self,
        plain: Any,
        requests: Sequence[Request],
        settings: Generation,
        tie: float,
        adapted: Callable[[int | None], object] = lambda _: None,
    ) -> None:
        self._plain, self._adapted = plain, adapted
        self._tie = tie
        self._requests = {request.number: request for request in requests}
        self._tenant: int | None = None
        self.settings = settings
        (place, size), keys = plain.turn, [(request, s) for request in requests for s in request.samples]
        own = [self._taken(request, sample) for request, sample in keys[place::size]]
        whole = [sample for part in everyone(own) for sample in part]
        self.settings = replace(settings, end_tokens=settings.end_tokens | _ends_of(whole))
        """With end tokens that plain samples have, in addition to the recipe's, so that some samples end early."""
        self.samples: Mapping[Key, Completion] = {sample[:2]: self._cut(sample) for sample in whole}

    def judge(self, sample: Completion) -> SampleVerdict:
        """Hold a sample against plain generation."""
        wanted, where = self.samples[sample[:2]], f"sample {sample.sample} of prompt {sample.prompt}"
        if sample.tokens == wanted.tokens and sample.ended == wanted.ended:
            return SampleVerdict("", 0, _largest(sample.log_probs, wanted.log_probs))
        pairs = zip(sample.tokens, wanted.tokens, strict=False)
        first = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if first is None:
            return SampleVerdict(f"{where} ends by {sample.ended} after {len(sample.tokens)} tokens, plain ones do not")
        if not self._tie:
            return SampleVerdict(f"{where} has another token at place {first}")
        return self._by_its_own_tokens(sample, where)

    def _by_its_own_tokens(self, sample: Completion, where: str) -> SampleVerdict:
        """Hold a sample, whose tokens a tie may have turned, against one forward of them."""
        flips, request, sampling = 0, self._requests[sample.prompt], self.settings.sampling
        logits = self._behind(request, sample.tokens)
        for place, token in enumerate(sample.tokens):
            drawn = self._noise(sample, place, logits.shape[1])
            loose, exact, tight = (scores(logits[place], drawn, sampling, s * self._tie) for s in (1, 0, -1))
            if not loose[token] >= tight.max() - self._tie:
                return SampleVerdict(f"{where} has another token at place {place}, which is not a tie")
            flips += int(token != exact.argmax())
        goes_on = sample.ended == "limit" and len(sample.tokens) < request.limit
        if goes_on or self._cut(sample._replace(ended="limit")) != sample:
            return SampleVerdict(f"{where} ends by {sample.ended} after {len(sample.tokens)} tokens, not by its own")
        expected = [float(log_probs(row)[token]) for row, token in zip(logits, sample.tokens, strict=True)]
        return SampleVerdict("", max(flips, 1), _largest(sample.log_probs, expected))

    def _taken(self, request: Request, number: int) -> Completion:
        sample = Completion(request.number, number, (), (), "limit")
        for place in range(request.limit):
            logits = self._behind(request, (*sample.tokens, 0))[-1]
            drawn = self._noise(sample, place, len(logits))
            token = int(scores(logits, drawn, self.settings.sampling).argmax())
            known = float(log_probs(logits)[token])
            sample = sample._replace(tokens=(*sample.tokens, token), log_probs=(*sample.log_probs, known))
        return sample

    def _behind(self, request: Request, tokens: Sequence[int]) -> Floats:
        """Logits by which each of these tokens after a prompt is taken [L, V], of one forward."""
        if request.tenant != self._tenant:
            self._tenant = request.tenant
            self._adapted(self._tenant)
        row = [*request.tokens, *tokens[:-1]]
        logits: Floats = self._plain.logits(row)[len(request.tokens) - 1 :].double().cpu().numpy()
        return logits

    def _noise(self, sample: Completion, place: int, vocabulary: int) -> Floats:
        behind = len(self._requests[sample.prompt].tokens) + place
        return noise((self.settings.seed, sample.prompt, sample.sample, behind), vocabulary)

    def _cut(self, sample: Completion) -> Completion:
        """A sample up to its end."""
        for count in range(1, len(sample.tokens) + 1):
            how: Ended | None = "end" if sample.tokens[count - 1] in self.settings.end_tokens else None
            if how or self.settings.stops(sample.tokens[:count]):
                tokens, known = sample.tokens[:count], sample.log_probs[:count]
                return sample._replace(tokens=tokens, log_probs=known, ended=how or "stop")
        return sample


def _ends_of(samples: Sequence[Completion]) -> frozenset[int]:
    """Tokens in the middle of some samples, as long as half of all have none of them."""
    ends: frozenset[int] = frozenset()
    for sample in samples:
        more = ends | {sample.tokens[len(sample.tokens) // 2]}
        if 2 * sum(more.isdisjoint(one.tokens) for one in samples) >= len(samples):
            ends = more
    return ends


def _largest(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference; infinite where one is not a number."""
    error = float(np.abs(np.subtract(some, others)).max(initial=0.0)) if len(some) == len(others) else math.inf
    return error if math.isfinite(error) else math.inf
