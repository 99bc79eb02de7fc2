"""The order in which samples are visited, and how they become global batches: so many of each, or as many as reach so
many tokens. A pure function of (num_samples, seed, epoch, consumed) and of the lengths of samples.

The global batch does not depend on the number of ranks, so a run resumes on any of them with the same batches in the
same order; ranks only choose which members of the batch they read. An epoch is a pseudo-random permutation of
0 .. num_samples-1, evaluated lazily: a Feistel network over the smallest power of two that holds all samples, and
*cycle walking* (apply it again until the result is a valid index), which keeps it a bijection. Fewer than two walks are
expected per index. O(1) memory, O(count) time: 0.5 ms for 512 of 1e8 samples, 8 ms for 65,536 (one shared x86 core);
a materialised permutation would take 800 MB per rank and epoch.

Nothing here uses numpy's random generators: their streams may change between releases, a saved run must not. Batches
never mix epochs: the tail of an epoch that is shorter than a batch is a short batch. Steps are counted by drawing them:
what is asked for in epochs or tokens is a number of steps before the first one runs. A batch of tokens depends on the
epoch's order, so each epoch is drawn (0.1 us a sample and 3 us a step); of batches of samples only the last epoch is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.aliases import Ints
from ...core.errors import EvenloadError

ALGORITHM = "feistel-1"
"""Named in every saved state: a state is refused, not reinterpreted, if the permutation ever changes."""

_ROUNDS = 8
_FIRST_GUESS = 256
_MOST_DRAWN = 10**8
_SMALL = 1 << 10
"""Up to here the permutation is sorted out of hashes (8 KiB): a network of a few bits mixes poorly."""
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class SampleOrder:
    """A position in the endless sequence of epochs; `take` gives the next samples and the position after them."""

    num_samples: int
    seed: int
    epoch: int = 0
    consumed: int = 0
    """Samples of this epoch already taken, 0 .. num_samples-1."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            detail = f"num_samples={self.num_samples}"
            raise EvenloadError("there is no sample to order", detail, "use another data set")
        if min(self.seed, self.epoch) < 0 or not 0 <= self.consumed < self.num_samples:
            detail = f"seed={self.seed}, epoch={self.epoch}, consumed={self.consumed} of {self.num_samples} samples"
            do = "seed and epoch start at 0; consumed is below the number of samples"
            raise EvenloadError("the position in the data is out of range", detail, do)

    def take(self, count: int) -> tuple[NDArray[np.int64], SampleOrder]:
        """The next ``count`` sample indices (fewer at the end of an epoch, never none) and the order after them."""
        if count < 1:
            raise EvenloadError("a batch needs samples", f"count={count}", "ask for one sample or more")
        stop = min(self.num_samples, self.consumed + count)
        indices = permute(np.arange(self.consumed, stop), self.num_samples, self.seed, self.epoch)
        ends = stop == self.num_samples
        return indices, replace(self, epoch=self.epoch + ends, consumed=0 if ends else stop)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, ready for JSON."""
        return {"algorithm": ALGORITHM, **asdict(self)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], num_samples: int) -> SampleOrder:
        """Continue where `state` was taken. Raises `EvenloadError` when the data set has another number of samples than
        the saved one, when the state was written by another algorithm, or when it is damaged."""
        if state.get("algorithm") != ALGORITHM:
            raise EvenloadError(
                "the saved data order was made by another version of evenload",
                f"algorithm {state.get('algorithm')!r}, this version has {ALGORITHM!r}",
                "resume with the version that saved it, or start the data afresh",
            )
        fields = {name: state.get(name) for name in ("num_samples", "seed", "epoch", "consumed")}
        if any(type(value) is not int for value in fields.values()):
            raise EvenloadError("the saved data order is damaged", f"{dict(state)}", "resume from another checkpoint")
        if fields["num_samples"] != num_samples:
            detail = f"{num_samples} samples now, {fields['num_samples']} when it was saved"
            do = "restore data.source, data.max_length and data.long_samples, or start the data afresh"
            raise EvenloadError("the data is not the data of the checkpoint", detail, do)
        return cls(**fields)  # type: ignore[arg-type]  # every value was just seen to be an int


def permute(positions: NDArray[np.int64], num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Samples at ``positions`` (each in [0, num_samples)) of the epoch's permutation; same shape."""
    keys = _keys(seed, epoch)
    if num_samples <= _SMALL:
        hashes = _mix(np.arange(num_samples, dtype=np.uint64), keys[0])
        return np.argsort(hashes, kind="stable")[positions].astype(np.int64)
    bits = (num_samples - 1).bit_length()
    walkers = _feistel(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(walkers >= num_samples)
    while outside.size:
        walkers[outside] = _feistel(walkers[outside], bits, keys)
        outside = outside[walkers[outside] >= num_samples]
    return walkers.astype(np.int64)


def _feistel(x: NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """One pass over [0, 2**bits): each round masks one half with a hash of the other, so it can be undone."""
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << (bits + 1) // 2) - 1)
    low, high = x & low_mask, x >> low_bits
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        low ^= _mix(high, first) & low_mask
        high ^= _mix(low, second) & high_mask
    return (high << low_bits) | low


def _mix(x: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)."""
    z = x + key
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def _keys(seed: int, epoch: int) -> list[np.uint64]:
    """One key per round. Seed and epoch are hashed one after the other, so (1, 0) and (0, 1) share nothing."""
    state = np.zeros(1, dtype=np.uint64)
    for word in (seed, epoch):
        state = _mix(state, np.uint64((word + 0x9E3779B97F4A7C15) & _WORD))
    rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return list(_mix(rounds, state[0]))


class BatchSize(NamedTuple):
    """What a global batch takes of the samples in their order."""

    samples: int
    tokens: int | None = None
    """If set, samples are taken until their tokens reach it, whatever their number."""

    def take(self, order: SampleOrder, lengths: Ints) -> tuple[NDArray[np.int64], SampleOrder]:
        """The samples of the next batch, never none, and the order after them; ``lengths`` [num_samples] in tokens."""
        if self.tokens is None:
            return order.take(self.samples)
        count = _FIRST_GUESS
        while True:
            samples, after = order.take(count)
            reached = int(np.searchsorted(np.cumsum(lengths[samples]), self.tokens)) + 1
            if reached <= len(samples):
                return order.take(reached)
            if after.epoch > order.epoch:
                return samples, after
            count *= 4

    def mean_samples(self, lengths: Ints) -> int:
        """Samples of a batch on average, rounded up."""
        return self.samples if self.tokens is None else min(len(lengths), -(-self.tokens // int(lengths.mean())))

    def steps(self, lengths: Ints, seed: int, *, epochs: int | None = None, tokens: int | None = None) -> int:
        """Steps of so many epochs; or until the samples drawn reach so many tokens, with the step that reaches them.

        Raises EvenloadError: more samples are to be drawn than is sensible.
        """
        of_epoch = int(lengths.sum())
        whole, rest = (epochs, 0) if epochs is not None else divmod(tokens or 0, of_epoch)
        draws = len(lengths) * ((whole if self.tokens is not None else 0) + (rest > 0))
        if draws > _MOST_DRAWN:
            what = "the steps of so many samples cannot be counted before the first one"
            raise EvenloadError(what, f"{draws:.2g} samples to draw", "set train.steps instead")
        if self.tokens is None:
            steps = whole * -(-len(lengths) // self.samples)
        else:
            steps = sum(len(self._ends(lengths, seed, epoch)) for epoch in range(whole))
        return steps + (int(np.searchsorted(self._ends(lengths, seed, whole), rest)) + 1 if rest else 0)

    def _ends(self, lengths: Ints, seed: int, epoch: int) -> Ints:
        """Tokens of an epoch up to the end of each of its batches, int64 [steps]."""
        samples, _ = SampleOrder(len(lengths), seed, epoch).take(len(lengths))
        reached = np.cumsum(lengths[samples])
        last = len(lengths) - 1
        if self.tokens is None:
            return reached[np.minimum(np.arange(self.samples, last + 1 + self.samples, self.samples) - 1, last)]
        ends = [0]
        while ends[-1] < reached[last]:
            ends.append(int(reached[min(int(np.searchsorted(reached, ends[-1] + self.tokens)), last)]))
        return np.array(ends[1:], dtype=np.int64)
