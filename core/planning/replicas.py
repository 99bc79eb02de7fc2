"""What sequences take on a replica, as its own planners plan and simulate them, and dealing them to replicas by that.

A sequence of n tokens costs what a stage computes and moves for it (`core.balance.step_bound.stage_costs`), its tokens'
part of a full micro-batch's launch included. That is within 0.5 % of the simulated step of a packed batch but where
sequences are cut, replayed or pass through stages. So sequences of some lengths, from a full micro-batch to the longest
one that fits, are planned among shorter ones, m of each length and 2 m of them: what m more take is by a factor more
than the formula says, linear between these lengths, and what the first m take beyond it is a step's fixed part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..aliases import Floats, Ints
from ..balance.replicas import Dealt, deal
from ..balance.step_bound import stage_costs
from ..errors import EvenloadError
from ..plan.step_plan import as_lengths
from .chain import PlanChain
from .judge import Candidate, judge

_PARTS = 32
"""The longest sequence that fits is known to such a part of the longest one that is asked for."""
_SHORTER = 4
"""Shorter sequences next to a long one, together as many tokens."""


class ReplicaCost(NamedTuple):
    """What sequences take on a replica; equal for replicas of a kind."""

    token_s: float
    pair_s: float
    """Of (query, key) pairs of causal attention."""
    fixed_s: float
    """Of a step, whatever its sequences: fill and drain of a pipeline, gradient sum, update."""
    lanes: int
    """Ranks, or groups of them, of which each has sequences of its own; 1: all share them."""
    lengths: tuple[int, ...]
    """Tokens, ascending, at which sequences were planned; none longer than the last one fits."""
    factors: tuple[float, ...]
    """By which they take longer than tokens and pairs."""

    @classmethod
    def of_chain(cls, chain: PlanChain, longest: int) -> ReplicaCost:
        """The costs of a replica with these planners for sequences of up to ``longest`` tokens. Raises EvenloadError,
        `PlanError` among them, where it cannot run even short ones."""
        cap, ranks = min(chain.caps.max_tokens, longest), chain.limits.num_ranks
        fits, lanes = _longest_that_fits(chain, longest, cap), 1 if chain.shares else ranks // chain.cp
        full = min(cap, fits)
        both = max((stage.both for stage in stage_costs(chain.context)), key=lambda cost: float(cost.seconds(full)))
        token_s, pair_s = ((both.linear_s + both.launch_s / cap) * lanes / ranks, both.pair_s * lanes / ranks)
        known = cls(token_s, pair_s, 0.0, lanes, (fits,), (1.0,))
        lengths = [*(full << power for power in range(fits.bit_length()) if full << power < fits), fits]
        once_s, twice_s = (_among_shorter(chain, full, times * _copies(chain, full, cap)).step_s for times in (1, 2))
        fixed_s, factors = max(0.0, 2 * once_s - twice_s), list[float]()
        for length in lengths:
            long_s, shorter_s = known.seconds(np.array([length, length // _SHORTER])).tolist()
            copies = 2 * _copies(chain, length, cap)
            each_s = (_among_shorter(chain, length, copies).step_s - fixed_s) * lanes / copies
            factors.append(max(1.0, (each_s - _SHORTER * shorter_s) / long_s))
        return known._replace(fixed_s=fixed_s, lengths=tuple(lengths), factors=tuple(factors))

    def slowed(self, factor: float) -> ReplicaCost:
        """The costs of a replica that takes so many times as long."""
        return self._replace(token_s=factor * self.token_s, pair_s=factor * self.pair_s, fixed_s=factor * self.fixed_s)

    def seconds(self, lengths: Ints) -> Floats:
        """Seconds of each sequence, float64 [S]; infinite where it does not fit. lengths int [S] in tokens."""
        n = lengths.astype(np.float64)
        seconds = (self.token_s * n + 0.5 * self.pair_s * n * n) * np.interp(n, self.lengths, self.factors)
        return np.where(lengths <= self.lengths[-1], seconds, np.inf)


def _copies(chain: PlanChain, length: int, cap: int) -> int:
    """As many sequences as give every rank full micro-batches for all stages."""
    return chain.limits.num_ranks * chain.limits.num_stages * -(-cap // length)


def _among_shorter(chain: PlanChain, length: int, copies: int) -> Candidate:
    """The plan of so many copies of a sequence and of shorter ones with as many tokens."""
    lengths = as_lengths([length] * copies + [max(1, length // _SHORTER)] * (_SHORTER * copies))
    return judge(chain.plan(lengths), chain.context)


def _longest_that_fits(chain: PlanChain, longest: int, cap: int) -> int:
    """Tokens of about the longest sequences, of at most ``longest``, of which a batch has a plan that fits into the
    device. Raises EvenloadError where not even short ones have."""
    least = max(1, longest // _PARTS)
    fits, too_long, tried = 0, longest + 1, longest
    while too_long - fits > least or not fits:
        try:
            missing_bytes = _among_shorter(chain, tried, 2 * _copies(chain, tried, cap)).missing_bytes
        except EvenloadError:
            if tried <= least:
                raise
            missing_bytes = 1.0
        if missing_bytes > 0 and tried <= least:
            what, lacks = "a replica cannot run even short sequences", f"{missing_bytes / 2**30:.3g} GiB"
            do = "give it more ranks or memory, or lower max_tokens"
            raise EvenloadError(what, f"of {tried} tokens: it lacks {lacks} on a device", do)
        fits, too_long = (tried, too_long) if missing_bytes <= 0 else (fits, tried)
        tried = max(least, (fits + too_long) // 2)
    return fits


def dealt(costs: Sequence[ReplicaCost], lengths: Ints) -> Dealt:
    """Sequences to replicas, each by its own costs: `Dealt` of replicas, not of their lanes. lengths int64 [S].

    Raises EvenloadError for a sequence that fits on none.
    """
    most = max(one.lengths[-1] for one in costs)
    if (longest := int(lengths.max(initial=0))) > most:
        what, detail = "a sample fits on no replica, even cut", f"{longest} tokens, the roomiest holds {most}"
        raise EvenloadError(what, detail, f"give one replica more tp or pp, or set data.max_length={most}")
    kinds = list(dict.fromkeys(costs))
    lanes = np.repeat([kinds.index(one) for one in costs], [one.lanes for one in costs])
    replicas = np.repeat(np.arange(len(costs)), [one.lanes for one in costs])
    seconds = np.stack([kind.seconds(lengths) for kind in kinds], axis=1)
    of_lanes = deal(seconds, np.array([kind.fixed_s for kind in kinds]), lanes)
    ends = np.zeros(len(costs))
    np.maximum.at(ends, replicas, of_lanes.seconds)
    return Dealt(replicas[of_lanes.replica_of], ends, of_lanes.bound_s)
