"""Guesses of the next tokens of all samples by the model itself, its weights rounded (`runtime.generate.quantized`).

The rounded model sees the exact model's keys, and the noise of the same places, so it mostly draws the same tokens. To
guess k of them takes k forwards of its own before the exact one, so they are worth it where these are faster:

    tokens a second = (1 + a + .. + a^k) / (k q + e + k r)

    a    share of guesses that were right where those before them were
    e    seconds of an exact forward without guesses
    q, r seconds of a forward of the rounded model, and of checking one guess more of every sample

These are the least of the last few forwards of about as many samples; k is where the rate is highest, and 0 where no
product with rounded weights is faster than the layers' own. Of a pipeline the last stage's k counts.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...core.errors import Rule
    from ...core.recipe.generated import DraftRule
    from ...core.recipe.recipe import Recipe
    from ...runtime.generate.quantized import QuantizedView
    from ...runtime.generate.request import Completion, DraftModel, MakeDrafter, UnfinishedSample

log = logging.getLogger("evenload")

_RUNS = 2
"""Forwards of a kind before it is known what they take, and guesses of a sample in those."""


def _last() -> deque[float]:
    return deque(maxlen=2 * _RUNS)


@dataclass
class _Seconds:
    """What forwards of about as many samples have taken."""

    exact: deque[float] = field(default_factory=_last)
    rounded: deque[float] = field(default_factory=_last)
    more: deque[float] = field(default_factory=_last)
    """Checking one guess more of each sample."""
    off: bool = False
    """Nothing is drafted any more."""

    def depth(self, right: float, most: int) -> int:
        """Guesses that give the most tokens a second, or those that are still to be measured."""
        if len(self.exact) < _RUNS:
            return 0
        if len(self.more) < _RUNS:
            return min(_RUNS, most)
        exact, of_guess = min(self.exact), min(self.rounded) + min(self.more)

        def rate(depth: int) -> float:
            return sum(right**place for place in range(depth + 1)) / (exact + depth * of_guess)

        return max(range(most + 1), key=rate)


class QuantizedDrafter:
    """Guesses by the model with rounded weights: those that are live when it is first asked, until it is dropped."""

    def __init__(self, rule: DraftRule) -> None:
        self._rule = rule
        self._view: QuantizedView | None = None
        self._guessed: dict[tuple[int, int], tuple[int, list[int]]] = {}
        """Of samples that are being computed: tokens before a guess, and the guess."""
        self._seconds: defaultdict[int, _Seconds] = defaultdict(_Seconds)
        """By samples, in powers of two."""
        self._open: tuple[_Seconds, float] | None = None
        """Where the forward under way counts, and guesses of a sample in it, in the mean."""
        self._right, self._of = 4.0, 5.0
        self._said = False

    def ahead(
        self, samples: Sequence[UnfinishedSample], fitting: Callable[[UnfinishedSample, int], int], model: DraftModel
    ) -> None:
        """Guess in the form that `ModelDrafter.ahead` has."""
        from ...runtime.generate.quantized import QuantizedView

        self._view = self._view or QuantizedView(model.linears, self._rule.weights, always=not model.priced)
        rows = 1 << (len(samples) - 1).bit_length()
        seconds = self._seconds[rows]
        depth = model.agreed(self._depth(self._view, rows) if model.priced else self._rule.most)
        self._open = seconds, 0.0
        if not depth:
            return
        rooms = [fitting(sample, depth) for sample in samples]
        guessed: list[list[int]] = [[] for _ in samples]
        begin = time.perf_counter()
        for place in range(max(rooms)):
            left = [number for number, most in enumerate(rooms) if most > place]
            with self._view.entered(rows):
                tokens = model.after([samples[number] for number in left], [guessed[number] for number in left])
            for number, token in zip(left, tokens, strict=True):
                guessed[number].append(token)
        if max(rooms):
            seconds.rounded.append((time.perf_counter() - begin) / max(rooms))
        self._open = seconds, sum(rooms) / len(rooms)
        for sample, own in zip(samples, guessed, strict=True):
            self._guessed[sample.request.number, sample.number] = len(sample.new), own

    def took(self, seconds: float) -> None:
        """Note what the exact forward took."""
        if self._open is not None:
            (of, guesses), self._open = self._open, None
            if not guesses:
                of.exact.append(seconds)
            elif of.exact:
                of.more.append(max(0.0, seconds - min(of.exact)) / guesses)

    def guess(self, sample: UnfinishedSample, most: int, least: float) -> list[int]:
        """Guess in the form that `Drafter.guess` has."""
        done, guessed = self._guessed.get((sample.request.number, sample.number), (-1, []))
        return guessed[:most] if done == len(sample.new) else []

    def saw(self, sample: UnfinishedSample) -> None:
        """Count how much of a guess was right."""
        done, guessed = self._guessed.pop((sample.request.number, sample.number), (0, []))
        for guess, token in zip(guessed, sample.new[done:], strict=False):
            self._right += guess == token
            self._of += 1
            if guess != token:
                break

    def _depth(self, view: QuantizedView, rows: int) -> int:
        """Guesses of each sample that are worth their forwards."""
        kind, of = self._rule.weights, self._seconds[rows]
        if of.off:
            return 0
        why = f"no product with {kind} weights is faster here than the layers' own"
        if view.products(rows):
            depth = of.depth(self._right / self._of, self._rule.most)
            if depth or len(of.more) < _RUNS:
                return depth
            exact_ms, rounded_ms = 1e3 * min(of.exact), 1e3 * min(of.rounded)
            why = f"a forward with {kind} weights takes {rounded_ms:.3g} ms, an exact one {exact_ms:.3g} ms"
        of.off = True
        if not self._said:
            self._said = True
            log.warning("no tokens are drafted while %d samples or so are under way: %s", rows, why)
        return 0


def drafter(rule: DraftRule) -> MakeDrafter:
    """The drafter of `generate.drafts.by: quantized`."""

    def make(earlier: Sequence[Completion]) -> QuantizedDrafter:
        return QuantizedDrafter(rule)

    return make


def unfit(recipe: Recipe) -> Iterator[Rule]:
    """What the model is not quantized for."""
    what, do = "generate.drafts.by=quantized does not draft {}", "set generate.drafts.by=texts, or leave drafts out"
    tp, zero = recipe.parallel.tp, recipe.deepspeed.zero_stage
    yield tp > 1, what.format("where ranks divide layers"), f"parallel.tp {tp}", do
    zero_3 = recipe.trainer == "deepspeed" and zero == 3
    yield zero_3, what.format("where ranks divide weights"), f"deepspeed.zero_stage {zero}", do
    yield recipe.adapts, what.format("for tenants"), "plugins.lora.enabled true", do
