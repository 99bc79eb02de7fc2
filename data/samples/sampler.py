"""A mixture for loops that are not evenload's: a sampler of PyTorch whose shares may change between steps.

    step t, of all ranks:   batch_t = the next ``global_batch_size`` samples of the mixture (`mixture`)
    of rank r of n:         batch_t[r::n], one sample after the other, or in micro-batches

A batch is a function of the state and the shares, never of ranks. Loaders draw ahead of what is trained on, so a state
is asked for by the steps that were trained: the sampler keeps those of the last `MOST_AHEAD` steps that it has drawn.
It knows no process group: whoever changes shares gives every rank the same ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...core.aliases import Ints
from ...core.errors import EvenloadError, nearest, refuse_first, shorten, shown
from ...core.input.bounds import RANKS, SAMPLES, SEQUENCES, TOKENS, whole_number
from ...core.policies import normalised
from ...core.recipe.shares import Shares
from .mixture import MixState, Mixture
from .numbering import DomainNumbers
from .order import BatchSize

MOST_AHEAD = 1024
"""Steps that a loader may have drawn and a loop not trained on yet."""


@dataclass(eq=False)
class MixtureSampler:
    """Sample numbers of several data sets in shares that may change at any step, for DataLoader and what builds on it.

        sampler = MixtureSampler({"code": len(code), "chat": len(chat)}, {"code": 3, "chat": 1}, 64)
        loader = DataLoader(ConcatDataset([code, chat]), batch_size=8, sampler=sampler)

    An iteration goes on where the last one has drawn to. Raises EvenloadError for what cannot be drawn.
    """

    samples: Mapping[str, int]
    """How many each domain has, in the order in which the data set has the domains one after the other."""
    shares: Mapping[str, float]
    """What is drawn of each, over their sum; 0: nothing. `set_shares` changes them."""
    global_batch_size: int
    """Samples of a step, over all ranks and micro-batches."""
    micro_batch_size: int | None = None
    """Give lists of so many (``batch_sampler=``); None: one number after the other (``sampler=``)."""
    rank: int = 0
    """Data-parallel rank that draws. Where a loader divides batches among ranks itself (Accelerate), leave it out."""
    num_ranks: int = 1
    steps: int | None = None
    """Of the whole run, after which nothing is drawn; None: no end, and no len()."""
    seed: int = 0
    """Of the order of every domain, with its name."""
    targets: Mapping[str, Sequence[int]] | None = None
    """What each sample counts in the shares, such as its tokens with loss, by domain; None: 1."""

    _drawn: MixState = field(init=False, repr=False)
    _kept: deque[MixState] = field(init=False, repr=False)
    """After the last steps that were drawn, the newest of which is ``_drawn``."""
    _first: int = field(init=False, repr=False)
    """Steps before the iteration that runs."""

    def __post_init__(self) -> None:
        self._refuse_unfit()
        self._in_loop = DomainNumbers(self.samples)
        ones = np.ones(1, dtype=np.int64)
        lengths: dict[str, Ints] = {name: np.broadcast_to(ones, count) for name, count in self.samples.items()}
        targets = self.targets.items() if self.targets else ()
        prices: dict[str, Ints] = {name: np.asarray(own, dtype=np.int64) for name, own in targets}
        self._mixture = Mixture(lengths, prices or None, BatchSize(self.global_batch_size), self._shares_at)
        self._points = [(0, self._checked(self.shares, {}))]
        self._go_on(self._mixture.begin(self.seed))

    def __iter__(self) -> Iterator[Any]:
        self._first = self._drawn.step
        while self.steps is None or self._drawn.step < self.steps:
            numbers, self._drawn = self._mixture.take(self._drawn)
            self._kept.append(self._drawn)
            own = self._numbered(numbers[self.rank :: self.num_ranks])
            size = self.micro_batch_size
            yield from own if size is None else [own[first : first + size] for first in range(0, len(own), size)]

    def __len__(self) -> int:
        """Numbers, or micro-batches, of this rank in an iteration from where the last one began, or a state was."""
        if self.steps is None:
            raise TypeError("a MixtureSampler without steps has no end")
        of_step = self.global_batch_size // self.num_ranks // (self.micro_batch_size or 1)
        return max(0, self.steps - self._first) * of_step

    def set_shares(self, shares: Mapping[str, float], step: int | None = None) -> None:
        """Draw by other shares from this step on, counted from 0; a domain that is left out keeps its own.

        None: the first step that is not drawn yet. Give every rank the same. Raises EvenloadError for a step that a
        loader has drawn already.
        """
        first = self._drawn.step if step is None else step
        if first < (drawn := self._drawn.step):
            what, do = "the step is drawn already, by other shares", f"change the shares from step {drawn} on"
            raise EvenloadError(what, f"step {first}, {drawn} are drawn", do)
        before = [point for point in self._points if point[0] < first]
        self._points = [*before, (first, self._checked(shares, before[-1][1] if before else self._points[0][1]))]

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """What a checkpoint keeps, ready for JSON: where the run is after so many steps, on any rank of any number.

        None: after all that is drawn, which a loader that reads ahead has not trained on. Raises EvenloadError for a
        step that is not drawn, or drawn too long ago.
        """
        place = self._drawn.step if step is None else step
        first, last = self._kept[0].step, self._kept[-1].step
        if not first <= place <= last:
            do = f"ask for steps {first} to {last}"
            raise EvenloadError("the sampler has no state of that step", f"step {place}", do)
        now = max(number for number, (first_step, _) in enumerate(self._points) if first_step <= place)
        points = [[first_step, dict(shares)] for first_step, shares in self._points[now:]]
        return replace(self._kept[place - first], shares_override={"points": points}).state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was asked for, by the shares of then; where domains have come or gone by those that
        were given here. Raises EvenloadError for a state that is damaged or of other data."""
        resumed = self._mixture.resume(state, self.seed)
        same, points = list(state["here"]) == self._mixture.names, resumed.shares_override.get("points")
        self._points = self._read(points) if same and points else [(0, self._checked(self.shares, {}))]
        self._go_on(resumed)

    def names_of(self, numbers: Sequence[int]) -> list[str]:
        """The domain of each of the numbers that the sampler gave."""
        return [self._in_loop.names[place] for place in self._in_loop.domain_of(np.asarray(numbers))]

    def _go_on(self, state: MixState) -> None:
        self._drawn, self._first = state, state.step
        self._kept = deque([state], maxlen=MOST_AHEAD + 1)

    def _numbered(self, samples: Ints) -> list[int]:
        """Numbers of the mixture, whose domains ascend by name, as the loop's data set has them."""
        own = self._mixture.numbers
        firsts = np.array([self._in_loop.firsts[self._in_loop.names.index(name)] for name in own.names])
        places = own.domain_of(samples)
        numbers: list[int] = (samples - own.firsts[places] + firsts[places]).tolist()
        return numbers

    def _shares_at(self, _: Mapping[str, Any], step: int) -> Shares:
        shares = [shares for first, shares in self._points if first <= step][-1]
        return normalised([shares[name] for name in self._mixture.names])

    def _read(self, points: Any) -> list[tuple[int, dict[str, float]]]:
        try:
            read = [(int(first), self._checked(shares, {})) for first, shares in points]
        except (TypeError, ValueError, AttributeError) as error:
            what, do = "the saved shares of the sampler are damaged", "resume from another checkpoint"
            raise EvenloadError(what, shorten(f"{points!r}"), do) from error
        return read

    def _checked(self, shares: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
        """The shares of all domains. Raises EvenloadError where one is none."""
        unknown = next((name for name in shares if name not in self.samples), "")
        whole = {**before, **shares}
        missing = [name for name in self.samples if name not in whole]
        numbers = [isinstance(share, float | int | np.number) and math.isfinite(share) for share in whole.values()]
        hint = nearest(unknown, self.samples)
        bad = not all(numbers) or any(share < 0 for share in whole.values())
        refuse_first(
            (bool(unknown), f"there is no domain {shown(unknown)}", f"share {shares.get(unknown)}", hint),
            (bool(missing), "a domain has no share", ", ".join(missing), "give it one; 0 draws nothing"),
            (bad, "a share is not a number from 0 up", shorten(f"{whole}"), "give numbers that are 0 or more"),
            (not any(whole.values()), "nothing would be drawn of any domain", "shares 0", "give one a share above 0"),
        )
        return {name: float(whole[name]) for name in self.samples}

    def _refuse_unfit(self) -> None:
        for name, count in self.samples.items():
            whole_number(count, f"samples of {name}", SAMPLES)
        whole_number(self.num_ranks, "num_ranks", RANKS)
        whole_number(self.global_batch_size, "global_batch_size", SEQUENCES)
        for key in ("steps", "micro_batch_size"):
            if getattr(self, key) is not None:
                whole_number(getattr(self, key), key, TOKENS)
        of_step = self.num_ranks * (self.micro_batch_size or 1)
        untargeted = next(
            (name for name, own in (self.targets or {}).items() if not np.any(own) or np.min(own) < 0), ""
        )
        sizes = {name: len(own) for name, own in self.targets.items()} if self.targets else dict(self.samples)
        refuse_first(
            (not self.samples, "there is no domain to draw from", "samples {}", "name one or more"),
            (not 0 <= self.rank < self.num_ranks, "there is no such rank", f"{self.rank} of {self.num_ranks}", ""),
            (
                self.global_batch_size % of_step != 0,
                "a global batch is not divided evenly",
                f"{self.global_batch_size} samples for {of_step} in micro-batches of all ranks",
                f"make global_batch_size a multiple of {of_step}",
            ),
            (sizes != dict(self.samples), "targets are not one a sample", f"{sizes}, samples {dict(self.samples)}", ""),
            (bool(untargeted), "a domain has no target, or fewer than none", untargeted, "leave it out"),
        )
