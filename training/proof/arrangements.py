"""In which orders, slots and caches a host generates the same samples, and what it computes for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...integrations.host.generating import samples_of
from ...integrations.host.host import Host
from ...integrations.host.step import Mark
from ...runtime.attention.pack import Pack
from ...runtime.generate.dealing import Dealer, Dealing, GenerationStats, SampleAssignment
from ...runtime.generate.drafts import DraftCounts
from ...runtime.generate.engine import Decoder
from ...runtime.generate.request import Completion, Generation, Request
from ...runtime.world.agreement import everyone
from .drafters import Guessing

_MOVED = 0.1
"""Share of tokens that are others at earlier weights."""


class Arrangement(NamedTuple):
    """One manner of generating the samples of some requests."""

    name: str
    settings: Generation
    order: Sequence[int]
    """The requests' places, in the order in which they are asked for."""
    interrupted: bool = False
    """Half of the forwards run first; then what has not ended is asked for again, in other slots."""
    dealer: Dealer = Dealer()
    """Which rank generates which samples."""


class Tossed(Dealer):
    """Deals samples to ranks that are drawn, and again after a few forwards that are drawn, too."""

    def deal(self, dealing: Dealing) -> SampleAssignment:
        """Deal samples in the form that `Dealer.deal` has."""
        drawn, left = np.random.default_rng(int(dealing.tokens.sum())), np.flatnonzero(dealing.ended == 0)
        ranks = drawn.integers(dealing.num_ranks, size=len(left))
        own = tuple(left[ranks == rank] for rank in range(dealing.num_ranks))
        return SampleAssignment(own, "tossed", drawn.integers(1, 6, size=dealing.num_ranks))


@dataclass
class Arranged:
    """What an arrangement gave, on all ranks alike, and what it took."""

    samples: list[Completion] = field(default_factory=list)
    before: int = 0
    """Samples that were there at the interruption."""
    forwards: int = 0
    """Forwards of the rank that ran most of them."""
    computed: int = 0
    """Tokens of all ranks' forwards."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    times: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How often each sample has ended."""


def arrangements(
    requests: Sequence[Request], settings: Generation, block_tokens: int, samples: Collection[Completion] = ()
) -> list[Arrangement]:
    """The recipe's own, and others that share prompts, cut them, and give samples up for want of blocks; where the
    recipe drafts, it does so by what these plain ``samples`` might have been at earlier weights, and two more draft
    otherwise."""
    if settings.drafter is not None:
        texts = {sample[:2]: sample.tokens for sample in samples}
        vocabulary = 1 + max(token for tokens in texts.values() for token in tokens)
        settings = replace(settings, earlier=[*_as_if_earlier(samples, vocabulary)], priced=False)
    forth = range(len(requests))
    drawn = np.random.default_rng(settings.seed).permutation(len(requests)).tolist()
    largest = max(len(request.tokens) + request.limit for request in requests)
    least = (-(-largest // block_tokens) + 1) * block_tokens

    def of(name: str, order: Sequence[int], **changes: Any) -> Arrangement:
        return Arrangement(name, replace(settings, **changes), order)

    rows = [
        of("the recipe's own", forth),
        of("one slot, last prompt first", forth[::-1], slots=1),
        of("prompts in chunks", drawn, slots=3, step_tokens=5),
        of("64 slots, the least cache", drawn[::-1], slots=64, cache_tokens=least, step_tokens=7),
        of("dealt again at borders that are drawn", drawn, slots=4)._replace(dealer=Tossed()),
        of("interrupted, and gone on", forth, slots=5, step_tokens=16)._replace(interrupted=True),
    ]
    if settings.drafter is not None:
        drawing, wrong = (partial(Guessing, vocabulary, known) for known in ({}, texts))
        rows += [
            of("drafts that are drawn", drawn, slots=4, step_tokens=9, drafter=lambda _: drawing()),
            of("drafts that are right, then wrong", forth[::-1], cache_tokens=least, drafter=lambda _: wrong()),
        ]
    return rows


def _as_if_earlier(samples: Collection[Completion], vocabulary: int) -> Iterator[Completion]:
    """Samples with other tokens here and there."""
    drawn = np.random.default_rng(len(samples))
    for sample in samples:
        tokens = np.array(sample.tokens)
        moved = np.where(drawn.random(len(tokens)) < _MOVED, drawn.integers(vocabulary, size=len(tokens)), tokens)
        yield sample._replace(tokens=tuple(moved.tolist()))


def arranged(host: Host, requests: Sequence[Request], arrangement: Arrangement, mark: Mark) -> Arranged:
    """Generate in this manner. Collective."""
    out, asked = Arranged(), [requests[place] for place in arrangement.order]
    if arrangement.interrupted:
        whole = Arranged()
        _run(host, asked, arrangement, mark, whole)
        _run(host, asked, arrangement, mark, out, most=whole.forwards // 2)
        out.before, there = len(out.samples), {sample[:2] for sample in out.samples}
        left = (r._replace(samples=tuple(s for s in r.samples if (r.number, s) not in there)) for r in asked[::-1])
        asked = [request for request in left if request.samples]
        arrangement = arrangement._replace(settings=replace(arrangement.settings, slots=64))
    if asked:
        _run(host, asked, arrangement, mark, out)
    return out


def _run(
    host: Host,
    requests: Sequence[Request],
    arrangement: Arrangement,
    mark: Mark,
    out: Arranged,
    most: int | None = None,
) -> None:
    watched: Any = _Watched(host, most)
    ended: list[tuple[int, int]] = []
    _, settings, *_, dealer = arrangement
    keeping = _KeepingDrafts(dealer)
    out.samples += samples_of(
        watched, requests, settings, lambda sample: ended.append(sample[:2]), lambda _: None, mark, keeping
    )
    out.drafts = out.drafts.plus(keeping.drafts)
    ranks = everyone((watched.forwards, watched.computed if host.collects else 0, ended))
    out.forwards += max(forwards for forwards, _, _ in ranks)
    out.computed += sum(computed for _, computed, _ in ranks)
    out.times.update(key for _, _, keys in ranks for key in keys)


class _KeepingDrafts(Dealer):
    """A dealer that keeps what came of drafts."""

    drafts = DraftCounts()

    def __init__(self, dealer: Dealer) -> None:
        self._dealer = dealer

    def deal(self, dealing: Dealing) -> SampleAssignment:
        return self._dealer.deal(dealing)

    def ran(self, stats: GenerationStats) -> None:
        self.drafts = stats.drafts


class _Watched:
    """A host whose forwards are counted, and end after so many on every rank."""

    def __init__(self, host: Host, most: int | None) -> None:
        self._host, self._most = host, most
        self.forwards = self.computed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    @contextmanager
    def decoding(self) -> Iterator[Decoder]:
        with self._host.decoding() as decoder:

            def logits(pack: Pack, slots: Tensor) -> Tensor | None:
                self.forwards += 1
                self.computed += sum(piece.length for piece in pack.slices)
                return decoder.logits(pack, slots)

            def goes_on(busy: bool) -> bool:
                return decoder.goes_on(busy) and self.forwards != self._most

            yield replace(decoder, logits=logits, goes_on=goes_on)
