"""Which rank generates which samples: what a dealer is asked, and the one that knows nothing of lengths.

Samples are dealt one by one, for those of one prompt are alike and would be long together. A dealer is a pure function
of what all ranks know: each asks it, and what they are told is compared before it is used. No token depends on it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...core.aliases import Ints
from ...core.plan.step_plan import Slice
from ..world.agreement import agree, gather_bytes, name_ranks
from .drafts import DraftCounts
from .request import Generation, Request

log = logging.getLogger("evenload")

LATE_S = 10.0
"""For which ranks wait for a dealer."""
_READY, _FAILED = b"\0", b"\1"


@dataclass(frozen=True)
class Dealing:
    """The samples of a generation at one moment, and what ranks have place for."""

    requests: Sequence[Request]
    of: Ints
    """Place of each sample's request among them [S]."""
    numbers: Ints
    """Of each sample in its request [S]."""
    num_ranks: int
    slots: int
    cache_tokens: int | None
    tokens: Ints
    """That each sample has after its prompt [S]."""
    ended: Ints
    """Whether it has its last one, 0 or 1 [S]."""
    ranks: Ints
    """Where each sample is [S]; -1: not dealt yet."""

    @classmethod
    def of_requests(cls, requests: Sequence[Request], settings: Generation, num_ranks: int) -> Dealing:
        """All samples of some requests, of which none has begun."""
        pairs = [(place, number) for place, request in enumerate(requests) for number in request.samples]
        of, numbers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        none = np.zeros(len(pairs), dtype=np.int64)
        return cls(requests, of, numbers, num_ranks, settings.slots, settings.cache_tokens, none, none, none - 1)

    @property
    def limits(self) -> Ints:
        """Tokens of each sample at most [S]."""
        return np.array([request.limit for request in self.requests], dtype=np.int64)[self.of]

    @property
    def as_it_is(self) -> SampleAssignment:
        """Samples stay where they are."""
        own = [(self.ended == 0) & (self.ranks == rank) for rank in range(self.num_ranks)]
        return SampleAssignment(tuple(np.flatnonzero(mask) for mask in own), "as it is")


class SampleAssignment(NamedTuple):
    """The samples of each rank, by their places, in the order in which it starts them."""

    ranks: tuple[Ints, ...]
    dealer: str
    forwards: Ints | None = None
    """Of each rank until samples are dealt again [R]; None: never."""

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal where ranks are told the same."""
        arrays = [*self.ranks, np.zeros(0, dtype=np.int64) if self.forwards is None else self.forwards]
        digest = hashlib.blake2b(repr([len(own) for own in arrays]).encode(), digest_size=16)
        for own in arrays:
            digest.update(own.astype("<i8").tobytes())
        return digest.digest()

    def places(self, samples: int) -> Ints:
        """The rank of each of so many samples; -1: of none."""
        ranks = np.full(samples, -1, dtype=np.int64)
        for rank, own in enumerate(self.ranks):
            ranks[own] = rank
        return ranks


class Forwards(NamedTuple):
    """What a rank computes between two borders."""

    forwards: int = 0
    samples: int = 0
    """Tokens of samples: one in each forward, and those that are drafted after it."""
    keys: int = 0
    """That these see."""
    prompt_tokens: int = 0
    """Of prompts, and of what is computed again."""

    def plus(self, pieces: Sequence[Slice], drafted: Mapping[int, int] | None = None) -> Forwards:
        """What stands here and one forward more, where so many tokens of some sequences are guesses."""
        known = drafted or {}
        rows = [piece for piece in pieces if piece.length == 1 + known.get(piece.sequence, 0)]
        own, keys = (sum(sizes) for sizes in ([piece.length for piece in rows], [piece.stop for piece in rows]))
        tokens = sum(piece.length for piece in pieces) - own
        return Forwards(self.forwards + 1, self.samples + own, self.keys + keys, self.prompt_tokens + tokens)


class GenerationStats(NamedTuple):
    """What came of a generation."""

    dealer: str
    work: tuple[tuple[Forwards, ...], ...]
    """Of each rank, from border to border."""
    moved: int = 0
    """Samples that went to another rank with tokens."""
    moved_tokens: int = 0
    """That they had, prompts among them: what receivers compute again."""
    drafts: DraftCounts = DraftCounts()
    """Of all ranks."""


class Dealer:
    """Deals samples in turn, those of the longest limit first, and never again."""

    def deal(self, dealing: Dealing) -> SampleAssignment:
        """The samples that have not ended, each on one rank; of those that are dealt already, where they are to be."""
        order = np.argsort(-dealing.limits, kind="stable")
        return SampleAssignment(tuple(order[rank :: dealing.num_ranks] for rank in range(dealing.num_ranks)), "spread")

    def ran(self, stats: GenerationStats) -> None:
        """Is told what came of it, on every rank."""


class WholePrompts(Dealer):
    """Deals prompts in turn, those of the longest limit first, each with all of its samples: a rule chooses among
    them."""

    def deal(self, dealing: Dealing) -> SampleAssignment:
        """Deal samples in the form that `Dealer.deal` has."""
        order = np.argsort(-dealing.limits, kind="stable")
        _, first, of = np.unique(dealing.of[order], return_index=True, return_inverse=True)
        ranks = np.argsort(np.argsort(first))[of] % dealing.num_ranks
        return SampleAssignment(tuple(order[ranks == rank] for rank in range(dealing.num_ranks)), "whole prompts")


def agreed(dealer: Dealer, dealing: Dealing) -> SampleAssignment:
    """What a dealer says at the beginning, the same on every rank; samples are spread, with a warning, where it fails
    or is late on any. Collective. Raises RankError where ranks are told different things."""
    asked = Future[SampleAssignment]()

    def ask() -> None:
        try:
            asked.set_result(_checked(dealer.deal(dealing), dealing))
        except Exception as error:
            asked.set_exception(error)

    threading.Thread(target=ask, name="evenload-dealing", daemon=True).start()
    dealt: SampleAssignment | None = None
    why = "see there"
    try:
        dealt = asked.result(LATE_S)
    except TimeoutError:
        why = f"nothing within {LATE_S:g} s"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    answers = gather_bytes(_READY if dealt else _FAILED)
    if dealt is None or _FAILED in answers:
        failed = name_ranks(rank for rank, answer in enumerate(answers) if answer == _FAILED)
        log.warning("samples are spread over ranks, as dealing them failed on %s: %s", failed, why)
        dealt = Dealer().deal(dealing)
    agree(dealt.digest, "dealings of samples", 0)
    return dealt


def _checked(dealt: SampleAssignment, dealing: Dealing) -> SampleAssignment:
    """The dealing, if each sample that has not ended is on one rank once. Raises AssertionError."""
    left = np.flatnonzero(dealing.ended == 0)
    assert len(dealt.ranks) == dealing.num_ranks, "another number of ranks"
    assert np.array_equal(np.sort(np.concatenate(dealt.ranks)), left), "samples are lost or repeated"
    return dealt


def again(dealer: Dealer, dealing: Dealing, before: SampleAssignment) -> SampleAssignment:
    """What a dealer says of samples that are under way; where it fails, they stay, with a warning."""
    try:
        return _checked(dealer.deal(dealing), dealing)
    except Exception as error:
        log.warning("samples stay on their ranks, as dealing them again failed: %s: %s", type(error).__name__, error)
    return dealing.as_it_is._replace(forwards=before.forwards)
