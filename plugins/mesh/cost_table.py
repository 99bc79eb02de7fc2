"""Seconds of a sequence on d ranks, by the simulator's own rules: what all of the planner's choices rest on.

    seconds(n, d) = compute(n) / d + exposed(n, d)            forward and backward

``compute`` is exact; ``exposed`` (communication that nothing hides) is tabulated from `core.costs.exposed` over
lengths, four to an octave, for every degree and every way in which ranks may share attention, and read off in between.
The table depends on the situation alone and is kept; reading it for 8,192 sequences takes some milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints, Ranks
from ...core.costs.attention_comm import SharedLoad, load_of
from ...core.costs.context import Direction, PlanningContext
from ...core.costs.exposed import attention_s, exposed_s, gathering_s
from ...core.plan.limits import Limits
from ...core.plan.step_plan import CpComm, MicroBatch, Slice
from .config import MeshConfig

LEAST_TOKENS = 4
"""Tokens that a rank has at least of a sequence that it shares: with every cp_comm each rank then has some."""
_GRID = 4
"""Lengths to an octave."""
_STEPS = 8
"""Degrees of more than a node to an octave."""


class CpStrategy(NamedTuple):
    """A way in which ranks share attention."""

    cp_comm: CpComm
    ulysses_degree: int = 0
    routed: bool = False

    def micro_batch(
        self, slices: Iterable[Slice], ranks: Ranks, cp_groups: tuple[Ranks, ...] = (), *, remap: bool = False
    ) -> MicroBatch:
        """Slices on ranks that share attention in this way."""
        return MicroBatch(tuple(slices), ranks, 0, self.cp_comm, self.ulysses_degree, cp_groups, remap, self.routed)


@dataclass(frozen=True)
class SequenceCosts:
    """What K sequences cost on each of D degrees, and which of them may be chosen."""

    degrees: Ints
    """[D] ascending, the first is 1."""
    tokens: Ints
    """[K, D]: the most tokens that one of the ranks holds."""
    forward: Floats
    """[K, D] seconds on each of the ranks; infinite where so many ranks may not share it."""
    backward: Floats
    strategy: Ints
    """[K, D]: number of the best way in `CostTable.strategies`."""

    @cached_property
    def seconds(self) -> Floats:
        """Forward and backward [K, D]."""
        return self.forward + self.backward

    @cached_property
    def area(self) -> Floats:
        """Rank-seconds of each sequence at each degree [K, D]."""
        return np.asarray(self.seconds * self.degrees, dtype=np.float64)

    @cached_property
    def alone(self) -> Floats:
        """Seconds on one rank [K]; infinite where that may not be."""
        return self.seconds[:, 0].copy()

    @cached_property
    def fastest(self) -> Floats:
        """Seconds on the degree of least seconds [K]."""
        return np.asarray(self.seconds.min(axis=1), dtype=np.float64)

    @cached_property
    def least_area(self) -> Floats:
        """Rank-seconds on the degree of least rank-seconds [K]."""
        return np.asarray(self.area.min(axis=1), dtype=np.float64)

    def under(self, cap: float) -> SequenceCosts:
        """These costs where one rank holds at most ``cap`` tokens of a sequence."""
        over = self.tokens > cap
        if not over.any():
            return self
        forward, backward = (np.where(over, np.inf, seconds) for seconds in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)

    def launching(self, forward_s: float, backward_s: float, cap: float) -> SequenceCosts:
        """With launches: one for a shared sequence, for one on a single rank its part of ``cap`` tokens of a launch."""
        part = np.where(self.degrees == 1, self.tokens / cap, 1.0)
        return replace(self, forward=self.forward + forward_s * part, backward=self.backward + backward_s * part)


class CostTable:
    """The table of one situation."""

    def __init__(self, context: PlanningContext, limits: Limits, config: MeshConfig, longest: int) -> None:
        self.context = context
        self.limits = limits
        self.config = config
        self.node = min(limits.node_ranks or limits.num_ranks, limits.num_ranks)
        self.degrees = np.array(_degrees(limits.num_ranks, self.node, config), dtype=np.int64)
        self.longest = 1 << max(8, int(longest - 1).bit_length())
        octaves = int(np.log2(self.longest / LEAST_TOKENS))
        self.grid = self.longest / 2.0 ** (np.arange(_GRID * octaves, -1, -1) / _GRID)
        """Lengths of the table, ascending."""
        self.strategies: list[CpStrategy] = [CpStrategy("")]
        self.launch = (
            context.costs.forward.launch_s + self._one_rank(1, 1) + gathering_s(context, 1),
            context.costs.backward.launch_s + self._one_rank(1, 2) + gathering_s(context, 2),
        )
        """Seconds of a pass without tokens, forward and backward."""
        self.modules: dict[int, Floats] = {}
        """By degree what of the exposed seconds is tensor and expert parallelism, forward and backward [2, grid]."""
        self.columns = [self._column(int(d)) for d in self.degrees]
        """Of each degree: numbers of its ways, and their exposed seconds [ways, grid], forward and backward."""
        self._column_of = dict(zip(self.degrees.tolist(), self.columns, strict=True))

    @property
    def launch_s(self) -> float:
        return sum(self.launch)

    @property
    def usable(self) -> list[int]:
        """The degrees at which some cp_comm can share attention, ascending; the first is 1."""
        return [degree for degree, (numbers, _, _) in zip(self.degrees.tolist(), self.columns, strict=True) if numbers]

    def of(self, lengths: Ints) -> SequenceCosts:
        """lengths int64 [K] -> what each costs on every degree."""
        lengths, places = np.unique(lengths, return_inverse=True)
        n = lengths.astype(np.float64)
        shape = (len(lengths), len(self.degrees))
        forward, backward, strategy = np.empty(shape), np.empty(shape), np.zeros(shape, dtype=np.int64)
        tokens = np.empty(shape, dtype=np.int64)
        costs = self.context.costs
        whole_f, whole_b = costs.forward.seconds(n), costs.backward.seconds(n)
        rows = np.arange(len(lengths))
        for j, (d, (numbers, first, second)) in enumerate(zip(self.degrees.tolist(), self.columns, strict=True)):
            tokens[:, j] = most_tokens(lengths, d)
            if not numbers:  # none of the cp_comm types allows so many
                forward[:, j] = backward[:, j] = np.inf
                continue
            exposed_f = np.array([np.interp(n, self.grid, row) for row in first])
            exposed_b = np.array([np.interp(n, self.grid, row) for row in second])
            best = (exposed_f + exposed_b).argmin(axis=0)
            forward[:, j] = whole_f / d + exposed_f[best, rows]
            backward[:, j] = whole_b / d + exposed_b[best, rows]
            strategy[:, j] = np.array(numbers)[best]
            if d > 1:
                few = n < LEAST_TOKENS * d
                forward[few, j] = backward[few, j] = np.inf
        return SequenceCosts(self.degrees, tokens[places], forward[places], backward[places], strategy[places])

    def exposed(self, strategy: CpStrategy, length: int, degree: int) -> tuple[float, float]:
        """Exposed seconds of a sequence, forward and backward; infinite where so many ranks may not share it so."""
        if strategy.cp_comm == "hybrid" and strategy.ulysses_degree == degree:
            strategy = strategy._replace(cp_comm="all_to_all", ulysses_degree=0)
        if degree <= self.node:
            strategy = strategy._replace(routed=False)
        if degree not in self._column_of:
            self._column_of[degree] = self._column(degree)
        numbers, first, second = self._column_of[degree]
        names = [self.strategies[number] for number in numbers]
        if strategy not in names:
            return float("inf"), float("inf")
        k = names.index(strategy)
        return float(np.interp(length, self.grid, first[k])), float(np.interp(length, self.grid, second[k]))

    def strategies_of(self, degree: int) -> list[CpStrategy]:
        """The ways in which so many ranks, in whole nodes as far as there are, may share attention."""
        if degree == 1:
            return [CpStrategy("")]
        heads, node, strategies = self.limits.heads, self.node, []
        for cp_comm in self.config.engines:
            if cp_comm in ("ring", "all_gather") or (cp_comm == "all_to_all" and shares_heads(heads, degree)):
                strategies.append(CpStrategy(cp_comm))
            elif cp_comm == "hybrid":
                strategies += [CpStrategy(cp_comm, u) for u in self._ulysses_degree(degree)]
        if degree > node > 1 and self.config.routed == "auto":
            strategies += [strategy._replace(routed=True) for strategy in strategies]
        return strategies

    def _ulysses_degree(self, degree: int) -> list[int]:
        """Sizes of groups that share heads: the largest that divide the parts of all nodes, and those of whole ones."""
        heads, node = self.limits.heads, self.node
        part = int(np.gcd(node, degree % node)) if degree > node else degree
        inside = [u for u in range(2, part + 1) if part % u == 0 and u < degree and shares_heads(heads, u)]
        across = [u for u in range(2 * node, degree, node) if degree % u == 0 and shares_heads(heads, u)]
        return inside[-2:] + across[-2:]

    def _column(self, degree: int) -> tuple[list[int], Floats, Floats]:
        """Numbers of a degree's ways, and their exposed seconds [ways, grid], forward and backward."""
        strategies = self.strategies_of(degree)
        for strategy in strategies:
            if strategy not in self.strategies:
                self.strategies.append(strategy)
        self.modules[degree] = np.stack([self._modules(degree, passes) for passes in (1, 2)])
        rows = [
            np.array([modules + self._attention(degree, strategy, passes) for strategy in strategies])
            for passes, modules in zip((1, 2), self.modules[degree], strict=True)
        ]
        return [self.strategies.index(strategy) for strategy in strategies], rows[0], rows[1]

    def _attention(self, degree: int, strategy: CpStrategy, passes: int) -> Floats:
        """Exposed seconds of attention for every length of the grid; infinite where there are fewer heads."""
        pieces = np.stack([self.grid, np.zeros_like(self.grid)], axis=1)
        shared = SharedLoad(tuple(range(degree)), load_of(pieces), *strategy)
        total = np.zeros_like(self.grid)
        for direction in self.directions(passes):
            total += attention_s(self.context, direction, shared)
        return total

    def _modules(self, degree: int, passes: int) -> Floats:
        """What tensor and expert parallelism leave exposed of every length of the grid, beyond that of no tokens."""
        layout = self.context.layout
        if layout.tp == layout.ep == 1:
            return np.zeros_like(self.grid)
        each = np.array([self._one_rank(n / degree, passes) for n in self.grid])
        return np.maximum(0.0, each - self._one_rank(1, passes))

    def _one_rank(self, tokens: float, passes: int) -> float:
        m = MicroBatch((Slice(0, 0, max(1, round(tokens))),), (0,))
        return sum(exposed_s(self.context, direction, m) for direction in self.directions(passes))

    def directions(self, passes: int) -> list[Direction]:
        """What runs in a forward (1) or in a backward (2), recomputation included."""
        costs = self.context.costs
        forward = [Direction(costs.forward, 1)]
        return forward if passes == 1 else [Direction(costs.backward, 2), *(forward if costs.recompute else [])]


_KNOWN: list[CostTable] = []
"""The latest tables."""


def cost_table_of(context: PlanningContext, limits: Limits, config: MeshConfig, longest: int) -> CostTable:
    """The table of a context, made anew only when something that it depends on has changed."""
    for known in _KNOWN:
        own = known.limits.num_ranks, known.limits.heads, known.limits.node_ranks
        same = own == (limits.num_ranks, limits.heads, limits.node_ranks) and known.config == config
        if longest <= known.longest and same and known.context == context:
            return known
    _KNOWN.insert(0, CostTable(context, limits, config, longest))
    del _KNOWN[4:]
    return _KNOWN[0]


def shares_heads(heads: int, ranks: int) -> bool:
    """Whether there are as many heads as ranks, perhaps uneven shares, which have their price; 0 heads: not known."""
    return not heads or ranks <= heads


def most_tokens(lengths: Ints, degree: int) -> Ints:
    """The most tokens of a sequence that one of so many ranks has, in the layout of every cp_comm."""
    return np.where(lengths % (2 * degree), lengths // degree + 2, lengths // degree) if degree > 1 else lengths


def _degrees(num_ranks: int, node: int, config: MeshConfig) -> list[int]:
    most = min(num_ranks, config.max_degree or num_ranks)
    if config.powers_of_two:
        return [1 << k for k in range(most.bit_length()) if 1 << k <= most]
    degrees, d = set(range(1, min(most, max(node, 8)) + 1)), node
    while d < most:
        d += max(1, node // 2, (d // _STEPS) // node * node)
        degrees.add(min(d, most))
    return sorted(degrees)
