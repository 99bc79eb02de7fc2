"""Batches out of several domains in shares that may change at any step, no sample lost or repeated.

Each domain has a `SampleOrder` of its own, seeded by its name, so that another domain, or another share, moves no
domain's order. Credits say whose turn it is. Of each sample that is drawn, of price p,

    credit[k] += p share[k]    for every domain k,        credit[of the sample] -= p

where p is 1, or the sample's targets; the next one is of the domain of the largest credit, by name where two are alike.
Credits are carried from step to step, so that shares which come to half a sample a step are drawn every second step.

    drawn[k] - due[k] < 1 sample, or the targets of the longest one,      due[k] = sum over samples of price x share[k]

at all times (the largest credit is above 0, and so it is above -p when it has paid). With up to three domains due -
drawn < 1 too, whatever shares become (two of three credits are above -2/3 each, so the larger of the others is below
5/6). Beyond three what is due may lag by more: by 1.10 at most in 3,900 histories of 2 to 59 domains. A domain of share
0 is not drawn from, unless all others are ahead of what is due to them.

Epochs are those of a domain, and a batch may hold the end of one and the beginning of the next. The state is that of
the orders and the credits: a batch follows from it and the shares alone, on any number of ranks. A domain that a run
goes on without keeps its state for when it comes back; where domains have come or gone credits begin anew. Nothing here
depends on the order in which domains are named. O(domains) a sample: 5.5 us of 4 domains.

Where samples are in groups an order is one of groups, and a whole group is drawn and paid for at once: a domain is then
never ahead by a whole group of the largest price, and a batch holds at least what its size says.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.aliases import Ints
from ...core.errors import EvenloadError, shorten
from ...core.recipe.shares import SharesOf
from .numbering import DomainNumbers
from .order import BatchSize, SampleOrder
from .whole_groups import Groups

ALGORITHM = "credits-1"
"""Named in every saved state, as that of an order is."""
_MOST_DRAWN = 10**6
_LOOK_AHEAD = 64
"""Samples of a domain that are looked up at once."""


@dataclass(frozen=True)
class MixState:
    """A position in the orders of all domains."""

    orders: Mapping[str, SampleOrder]
    """By domain, names ascending."""
    credits: tuple[float, ...]
    """[domains] what is due to each, in samples or targets."""
    step: int = 0
    """Batches that have been drawn."""
    shares_override: Mapping[str, Any] = field(default_factory=dict)
    """What says the shares instead of the step, as a record of them, ready for JSON; empty: nothing does."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """States of domains that are not here now."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, ready for JSON."""
        here = {
            name: {**order.state(), "credit": credit}
            for (name, order), credit in zip(self.orders.items(), self.credits, strict=True)
        }
        own = {"algorithm": ALGORITHM, "step": self.step, "policy": dict(self.shares_override)}
        return {**own, "domains": {**self.absent, **here}, "here": list(here)}


class Mixture:
    """Takes batches of samples that are numbered through all domains, by ascending names.

    Args:
        lengths: by domain [num_samples] tokens of each.
        targets: by domain the price of each sample; None: each costs 1.
        size: what a batch holds: samples, or tokens that its samples reach.
        shares: of the domains by ascending names.
        groups: by domain [num_samples] the group of each sample; None: each is by itself.
    """

    def __init__(
        self,
        lengths: Mapping[str, Ints],
        targets: Mapping[str, Ints] | None,
        size: BatchSize,
        shares: SharesOf,
        groups: Mapping[str, Ints] | None = None,
    ) -> None:
        self.names = sorted(lengths)
        self._lengths = [lengths[name] for name in self.names]
        self._prices = None if targets is None else [targets[name] for name in self.names]
        self._groups = [Groups(groups[name]) for name in self.names] if groups else []
        self._size, self._shares = size, shares
        self.numbers = DomainNumbers({name: len(lengths[name]) for name in self.names})

    def begin(self, seed: int) -> MixState:
        """The position before the first batch."""
        counts = {name: len(own.counts) for name, own in zip(self.names, self._groups, strict=False)}
        counts = counts or self.numbers.sizes
        orders = {name: SampleOrder(count, seed_of(name, seed)) for name, count in counts.items()}
        return MixState(orders, (0.0,) * len(orders))

    def resume(self, state: Mapping[str, Any], seed: int) -> MixState:
        """Go on where a state was taken; domains that it does not know begin. Raises EvenloadError for a state of
        other data, of another algorithm, or one that is damaged."""
        begun = self.begin(seed)
        if state.get("algorithm") != ALGORITHM:
            detail, do = f"algorithm {state.get('algorithm')!r}", "restore data.*, or start anew with another folder"
            raise EvenloadError("the checkpoint's order of samples is none of domains as this version has", detail, do)
        try:
            kept, step, override = dict(state["domains"]), int(state["step"]), dict(state["policy"])
            same = list(state["here"]) == self.names
            credits = tuple(float(kept[name]["credit"]) for name in self.names) if same else begun.credits
            if step < 0 or not all(map(math.isfinite, credits)):
                raise ValueError("a step or a credit that is none")
            orders = {name: self._resumed(name, kept.get(name), order) for name, order in begun.orders.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, EvenloadError):
                raise
            what = "the saved state of the domains is damaged"
            raise EvenloadError(what, shorten(f"{error!r}"), "resume from another checkpoint") from error
        absent = {name: own for name, own in kept.items() if name not in orders}
        return MixState(orders, credits, step, override, absent)

    def take(self, state: MixState) -> tuple[NDArray[np.int64], MixState]:
        """The next batch, never empty, and the position after it."""
        shares, credits = self._shares(state.shares_override, state.step), list(state.credits)
        shared = [place for place, share in enumerate(shares) if share > 0]
        upcoming = [_Upcoming(order) for order in state.orders.values()]
        drawn: list[tuple[int, int]] = []
        tokens = 0
        while len(drawn) < self._size.samples if self._size.tokens is None else tokens < self._size.tokens:
            domain = _next_of(credits, shares, shared)
            unit, lengths = upcoming[domain].next(), self._lengths[domain]
            samples = self._groups[domain].members(unit).tolist() if self._groups else [unit]
            prices = None if self._prices is None else self._prices[domain]
            price = len(samples) if prices is None else sum(int(prices[sample]) for sample in samples)
            credits = [credit + price * share for credit, share in zip(credits, shares, strict=True)]
            credits[domain] -= price
            tokens += sum(int(lengths[sample]) for sample in samples)
            drawn += [(domain, sample) for sample in samples]
        orders = {name: one.order for name, one in zip(self.names, upcoming, strict=True)}
        firsts = self.numbers.firsts.tolist()
        numbers = np.array([firsts[domain] + sample for domain, sample in drawn], dtype=np.int64)
        return numbers, replace(state, orders=orders, credits=tuple(credits), step=state.step + 1)

    def steps(self, seed: int, *, epochs: int | None = None, tokens: int | None = None) -> int:
        """Steps until every domain has been drawn so many times, or until so many tokens are. Raises EvenloadError
        where these are more samples than can be drawn before the first step."""
        state, drawn, reached, lengths = self.begin(seed), 0, 0, np.concatenate(self._lengths)
        while (reached < tokens) if tokens is not None else min(o.epoch for o in state.orders.values()) < (epochs or 0):
            samples, state = self.take(state)
            drawn, reached = drawn + len(samples), reached + int(lengths[samples].sum())
            if drawn > _MOST_DRAWN:
                what = "the steps of so many samples cannot be counted before the first one"
                raise EvenloadError(what, f"more than {_MOST_DRAWN} samples to draw", "set train.steps instead")
        return state.step

    @staticmethod
    def _resumed(name: str, kept: Any, begun: SampleOrder) -> SampleOrder:
        if kept is None:
            return begun
        try:
            return SampleOrder.from_state(kept, begun.num_samples)
        except EvenloadError as error:
            raise EvenloadError(f"the domain {name}: {error.what}", error.found, error.do) from error


def seed_of(name: str, seed: int) -> int:
    """The seed of a domain's order: another one for each name, whatever other domains there are."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _next_of(credits: Sequence[float], shares: Sequence[float], shared: Sequence[int]) -> int:
    """The domain that is drawn from next, one of the ``shared`` if it can be: shares tell where nothing is due yet."""
    due = [credit + share for credit, share in zip(credits, shares, strict=True)]
    first = max(shared, key=due.__getitem__)
    return first if due[first] > 0 else due.index(max(due))


class _Upcoming:
    """The samples of one domain from a position on, one after the other, over the ends of epochs."""

    def __init__(self, order: SampleOrder) -> None:
        self._begun, self._looked_at = order, order
        self._ahead: list[int] = []
        self._taken = 0

    def next(self) -> int:
        if not self._ahead:
            samples, self._looked_at = self._looked_at.take(_LOOK_AHEAD)
            self._ahead = samples.tolist()[::-1]
        self._taken += 1
        return self._ahead.pop()

    @property
    def order(self) -> SampleOrder:
        """After the samples that were taken."""
        epochs, consumed = divmod(self._begun.consumed + self._taken, self._begun.num_samples)
        return replace(self._begun, epoch=self._begun.epoch + epochs, consumed=consumed)
