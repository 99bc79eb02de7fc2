"""SART's rule: of N samples of a prompt keep M, end the rest, prune what scores badly (SART, arXiv 2505.13326).

    chance that M of N have ended by a length below which a share F of samples is:
    sum over i = M .. N of  C(N, i) F^i (1 - F)^(N - i)

Every T tokens the samples that live are scored. Before any has ended, those below ``below`` are pruned, ``most`` in all
at most; after that, those below the score of the first that ended. When M have ended the rest stops.

Everything counts in a sample's own tokens, not in seconds or in steps of a rank: *first* is shortest, ties by number.
So the samples that are kept depend on the samples alone, not on slots, ranks or order: a border is decided when each
sample has reached it or ended before it. Nothing is pruned that would leave fewer than M. What a rule keeps is not what
all samples would be: shorter ones are kept, so it serves votes, best of N and data, and no policy gradient.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.errors import EvenloadError, refuse_first
from .student_t import survival

_MOST_SAMPLES = 4096


@dataclass(frozen=True)
class Prune:
    """Which samples a score ends early."""

    below: float
    """Before any sample has ended: those of a lower score."""
    most: int
    """Samples that are pruned so."""


@dataclass(frozen=True)
class Collect:
    """Keep the ``keep`` samples of ``of`` that end first. Raises EvenloadError."""

    keep: int
    of: int
    every: int = 256
    """Tokens between two borders."""
    prune: Prune | None = None

    def __post_init__(self) -> None:
        refuse_first(
            (not 1 <= self.keep <= self.of, "keep is not from 1 to of", f"keep {self.keep} of {self.of}", "keep fewer"),
            (self.every < 1, "every is below 1 token", str(self.every), "give tokens between two borders"),
            (
                self.prune is not None and (self.prune.most < 0 or math.isnan(self.prune.below)),
                "prune is no rule",
                f"{self.prune}",
                "give a score and a count of 0 or more",
            ),
        )


@dataclass(frozen=True)
class Collected:
    """The samples of one prompt at a border."""

    rule: Collect
    border: int = 0
    """Tokens up to which everything is decided."""
    ended: tuple[tuple[int, int], ...] = ()
    """(tokens, number) of samples that ended, the shortest first; `keep` of them at most."""
    pruned: tuple[tuple[int, int], ...] = ()
    """(tokens, number) of samples that were pruned."""
    first_score: float | None = None
    """Score of the first that ended."""

    @property
    def live(self) -> tuple[int, ...]:
        """Numbers of the samples that go on to the next border; none when all is decided."""
        if len(self.ended) == self.rule.keep:
            return ()
        gone = {number for _, number in (*self.ended, *self.pruned)}
        return tuple(number for number in range(self.rule.of) if number not in gone)

    @property
    def next_border(self) -> int:
        """Tokens at which live samples wait for each other; without pruning nothing is decided before enough end."""
        return self.border + self.rule.every

    def stops_at(self, ended: Mapping[int, int]) -> int | None:
        """Tokens beyond which no sample is needed, by those that have ``ended`` since the border (number: tokens)."""
        lengths = sorted([*(tokens for tokens, _ in self.ended), *ended.values()])
        return lengths[self.rule.keep - 1] if len(lengths) >= self.rule.keep else None

    def at_border(self, ended: Mapping[int, int], scores: Mapping[int, float]) -> Collected:
        """Decide the next border.

        ``ended``: tokens of the live samples that ended at or before it; ``scores`` of all live ones, ended or not, by
        number; without ``prune`` they may be empty. Raises EvenloadError.
        """
        border = self.next_border
        live = self.live
        self._check(border, live, ended, scores)
        new = sorted((tokens, number) for number, tokens in ended.items())
        first = self.first_score
        if first is None and new and self.rule.prune:
            first = float(scores[new[0][1]])
        kept = (*self.ended, *new)[: self.rule.keep]
        going = [number for number in live if number not in ended]
        pruned = self._pruned(going, len(kept), first, scores) if len(kept) < self.rule.keep else []
        gone = tuple((border, number) for number in sorted(pruned))
        return replace(self, border=border, ended=kept, pruned=(*self.pruned, *gone), first_score=first)

    def _pruned(self, going: list[int], num_ended: int, first: float | None, scores: Mapping[int, float]) -> list[int]:
        if self.rule.prune is None:
            return []
        bar = self.rule.prune.below if first is None else first
        most = num_ended + len(going) - self.rule.keep
        if first is None:
            most = min(most, self.rule.prune.most - len(self.pruned))
        worst = sorted((scores[number], number) for number in going if scores[number] < bar)
        return [number for _, number in worst[: max(0, most)]]

    def _check(self, border: int, live: tuple[int, ...], ended: Mapping[int, int], scores: Mapping[int, float]) -> None:
        odd = {n: tokens for n, tokens in ended.items() if n not in live or not self.border < tokens <= border}
        refuse_first(
            (not live, "everything is decided", f"{len(self.ended)} samples are kept", "ask for no further border"),
            (bool(odd), "samples ended that do not live, or at other tokens", f"{odd}", f"up to {border} tokens"),
        )
        if self.rule.prune:
            wrong = [number for number in live if not math.isfinite(scores.get(number, math.nan))]
            detail = f"no finite score for {wrong[:8]}"
            if wrong:
                raise EvenloadError("a score is missing or no number", detail, "score every live sample")


def ended_by(keep: int, of: int, share: float) -> float:
    """Chance that ``keep`` of ``of`` samples have ended by a length below which a ``share`` of samples is."""
    low, high = math.log(max(share, 1e-300)), math.log1p(-min(share, 1 - 1e-16))
    terms = (
        math.lgamma(of + 1) - math.lgamma(i + 1) - math.lgamma(of - i + 1) + i * low + (of - i) * high
        for i in range(keep, of + 1)
    )
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def samples_for(keep: int, mu: float, sigma: float, tokens: int, chance: float) -> int:
    """The fewest samples of which ``keep`` have ended by ``tokens`` with a chance; lengths are log-t. Raises
    EvenloadError where too many would be needed."""
    share = 1.0 - float(survival(np.array((math.log(tokens) - mu) / sigma)))
    counts = range(keep, _MOST_SAMPLES + 1)
    index = bisect_left(counts, chance, key=lambda of: ended_by(keep, of, share))
    if index == len(counts):
        detail = f"{100 * share:.3g} % of samples end by {tokens} tokens"
        raise EvenloadError(f"no {_MOST_SAMPLES} samples end in time", detail, "raise tokens, or ask for less")
    return counts[index]


def kept_beside_all(collected: Collected, lengths: Ints, scores: Floats) -> dict[str, float]:
    """A table's row: what a rule keeps next to what all samples give, whose lengths [N] and scores [N] are known."""
    kept = [number for _, number in collected.ended]
    spent = {number: tokens for tokens, number in (*collected.ended, *collected.pruned)}
    last = collected.ended[-1][0] if len(kept) == collected.rule.keep else int(np.max(lengths))
    tokens = sum(spent.get(number, min(last, int(lengths[number]))) for number in range(collected.rule.of))
    return {
        "kept": len(kept),
        "pruned": len(collected.pruned),
        "tokens": tokens,
        "tokens_of_all": int(np.sum(lengths)),
        "kept_tokens": float(np.mean(lengths[kept])),
        "mean_tokens": float(np.mean(lengths)),
        "kept_score": float(np.mean(scores[kept])),
        "mean_score": float(np.mean(scores)),
    }
