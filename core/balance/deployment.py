"""Which replicas a number of ranks is divided into: the kinds, and how many of each (LobRA, arXiv 2509.01193, 4.2).

All multisets of at most three shapes that use every rank are counted, and bounded at once: at prices p_k of a second on
a replica of kind k, for kinds that a multiset lacks as high as makes no sequence dearer,

    no dealing to n_k replicas of each kind ends before   (sum_s min_k p_k seconds[s, k] + sum_k n_k p_k fixed_k) /
                                                          (sum_k n_k p_k)

The one of the least bound is looked at next: first for prices of its own (`replicas.prices_of`), which raise the bounds
of others too, then it is dealt to. When no bound is lower than the best dealing, that one is proven. 64 ranks and 16
shapes take about 2 s (benchmarks/planning/dealing.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..aliases import Floats, Ints
from ..errors import EvenloadError
from .replicas import Dealt, deal, prices_of

_MOST_SHAPES = 3
AS_FAST = 0.005
"""One shape for all replicas is taken where unlike ones save no more than this share of the step."""


class ReplicaKind(NamedTuple):
    """Replicas that take equally long."""

    shape: str
    """Equal for replicas of one shape, also on unlike cards."""
    ranks: int
    seconds: Floats
    """Of each sequence, float64 [S]; infinite where it does not fit."""
    fixed_s: float = 0.0
    cards: int = 0
    """Number of the kind of cards that it is on."""


@dataclass(frozen=True)
class Deployment:
    """How many replicas of each kind there are, and what the sequences that were asked with take on them."""

    counts: Ints
    """[K]"""
    dealt: Dealt
    """To the replicas in the order of their kinds."""
    one_shape: tuple[Ints, Dealt] | None
    """The same with one shape for all; None: there is none that holds all sequences on all cards."""
    floor_s: float
    """Nothing of at most three of the shapes ends before."""


def deploy(kinds: Sequence[ReplicaKind], cards: Sequence[int], gap: float = 0.005) -> Deployment:
    """The replicas whose dealing ends first, or not later than that by more than a gap; one shape where it is as fast.

    ``cards``: ranks of each kind of cards, all of which are used. Raises EvenloadError where no choice of the kinds
    fills the ranks and holds every sequence.
    """
    seconds, fixed_s = np.stack([kind.seconds for kind in kinds], axis=1), np.array([kind.fixed_s for kind in kinds])
    holds = np.isfinite(seconds)
    rows = [row for row in _multisets(kinds, cards) if holds[:, np.flatnonzero(row)].any(axis=1).all()]
    if not rows:
        detail = f"of {len(kinds)} kinds the roomiest holds {holds.mean(axis=0).max():.1%} of the sequences"
        do = "more ranks or memory, or shorter samples (data.max_length)"
        raise EvenloadError("no replicas use all ranks and hold every sequence", detail, do)
    counts, floors = np.array(rows), np.zeros(len(rows))
    dealings, asked = dict[int, Dealt](), set[int]()

    def look(at: int) -> None:
        nonlocal floors
        if at not in asked:
            asked.add(at)
            floors = np.maximum(floors, _floors(seconds, fixed_s, counts, at))
        else:
            own = np.flatnonzero(counts[at])
            dealings[at] = deal(seconds[:, own], fixed_s[own], np.repeat(np.arange(len(own)), counts[at, own]))

    shapes = [{kind.shape for kind, count in zip(kinds, row, strict=True) if count} for row in rows]
    one_shape = [at for at, some in enumerate(shapes) if len(some) == 1]
    for at in one_shape * 2:
        look(at)
    one = best = min(dealings, key=lambda at: dealings[at].step_s, default=None)
    while len(dealings) < len(rows):
        at = int(np.where([number in dealings for number in range(len(rows))], np.inf, floors).argmin())
        if best is not None and floors[at] >= dealings[best].step_s * (1 - gap):
            break
        look(at)
        best = min(dealings, key=lambda at: dealings[at].step_s, default=None)
    assert best is not None
    floor_s = min(float(floors.min()), dealings[best].step_s)
    if one is not None and dealings[one].step_s <= dealings[best].step_s * (1 + AS_FAST):
        best = one
    of_one = None if one is None else (counts[one], dealings[one])
    return Deployment(counts[best], dealings[best], of_one, floor_s)


def _floors(seconds: Floats, fixed_s: Floats, counts: Ints, at: int) -> Floats:
    """No dealing to each of these multisets ends before [s], by the prices of one of them, float64 [M]."""
    own = np.flatnonzero(counts[at])
    prices = prices_of(seconds[:, own], fixed_s[own], counts[at, own])
    least_s = (seconds[:, own] * prices).min(axis=1)
    every = (least_s[:, None] / seconds).max(axis=0)
    every[own] = prices
    paid = counts * every
    return np.asarray((least_s.sum() + paid @ fixed_s) / paid.sum(axis=1), dtype=np.float64)


def _multisets(kinds: Sequence[ReplicaKind], cards: Sequence[int]) -> Iterator[list[int]]:
    """How many replicas of each kind, of at most three shapes, use all cards; none of kinds that others always beat."""
    useful = [not any(_beats(other, kind, before=at < own) for at, other in enumerate(kinds) if at != own)
              for own, kind in enumerate(kinds)]  # fmt: skip

    def further(chosen: list[int], left: list[int], shapes: frozenset[str]) -> Iterator[list[int]]:
        if len(chosen) == len(kinds):
            yield from [] if any(left) else [chosen]
            return
        kind = kinds[len(chosen)]
        known = kind.shape in shapes or len(shapes) < _MOST_SHAPES
        for count in range(left[kind.cards] // kind.ranks + 1 if known and useful[len(chosen)] else 1):
            less = [ranks - count * kind.ranks * (at == kind.cards) for at, ranks in enumerate(left)]
            yield from further([*chosen, count], less, shapes | {kind.shape} if count else shapes)

    return further([], list(cards), frozenset())


def _beats(one: ReplicaKind, other: ReplicaKind, *, before: bool) -> bool:
    """Whether a kind is never slower than another one of as many ranks of the same cards; of equal ones one is."""
    if (one.ranks, one.cards) != (other.ranks, other.cards) or one.fixed_s > other.fixed_s:
        return False
    less = one.fixed_s < other.fixed_s or (one.seconds < other.seconds).any()
    return bool((one.seconds <= other.seconds).all() and (less or before))
