"""Plans of samples that begin alike: those of one trunk stay together where that pays, and compute it once.

    sample         trunk + own tokens          what a plan counts of it: its own tokens, and the trunk where it is the
    tree           samples of one trunk        first of its part
    part           samples of a tree that stay in one micro-batch, and compute its trunk once

All trees are cut into 1, 2, 4, ... parts each, the parts are planned as whole sequences, and the plan of the least
predicted seconds is taken: whole trees compute least, and a trunk that is computed twice may even the ranks. Parts are
not planned whose certified bound is no less than the best plan, so a batch is planned twice as a rule. A tree that is
over the cap of a micro-batch has as many parts as it needs. Long and short samples of a tree take turns, so that parts
are even; trees come by what they hold, so that a plan takes as long in whatever order samples come.

Shape legend: S = samples, those of a tree next to each other, K = trees, P = parts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..aliases import Ints
from ..errors import EvenloadError
from ..laws import check
from ..plan.step_plan import NO_TRUNKS, Lengths, MicroBatch, Slice, StepPlan, as_lengths
from ..plan.trie import WORTH
from ..simulate.step import after_passes_s
from .chain import PlanChain
from .judge import judge


class Branch(NamedTuple):
    """A sample of a batch, by what it computes."""

    tokens: int
    pairs: int
    """Of a query and a key."""
    trunk: int = 0
    """Tokens that it begins with and others may begin with, too."""
    tree: Hashable = None
    """Equal where trunks are; None: it shares nothing."""


class _Trees(NamedTuple):
    """The samples of a batch by tree, int64."""

    samples: Ints
    """Their numbers in the batch."""
    tokens: Ints
    pairs: Ints
    trunks: Ints
    sizes: Ints
    """Samples of each."""


class _Parts(NamedTuple):
    """Trees that are cut into parts, int64."""

    firsts: Ints
    """The place of the first sample of each."""
    sizes: Ints
    """Samples of each."""
    trunks: Ints
    """Tokens that the first sample alone computes, as `core.plan.trie` has it; 0: it shares nothing."""
    tokens: Ints
    """What each sample computes."""

    @property
    def lengths(self) -> Lengths:
        """What each part computes [P]."""
        return as_lengths(np.add.reduceat(self.tokens, self.firsts))


class _Candidate(NamedTuple):
    step_s: float
    parts: _Parts
    plan: StepPlan
    """Of the parts."""


def branches_of(chain: PlanChain, batch: Lengths, groups: Any, trunks: Any) -> tuple[Branch, ...]:
    """The samples of a batch that has trunks, as `plan_trees` takes them; empty where each is planned by itself.

    Args:
        groups: of each sample [S].
        trunks: tokens that each begins with as all of its group do [S]; None: none.
    """
    if trunks is None or not np.any(trunks) or not chain.trees or chain.instead:
        return ()
    caps = chain.caps
    if chain.shares or chain.cp > 1 or caps.padded or caps.equal_size or len(chain.groups_in(batch)):
        return ()
    if batch.max() > caps.max_tokens:
        return ()
    rows = zip(batch.tolist(), as_lengths(groups).tolist(), as_lengths(trunks).tolist(), strict=True)
    return tuple(Branch(n, n * (n + 1) // 2, trunk, group if trunk else None) for n, group, trunk in rows)


def plan_trees(chain: PlanChain, samples: Sequence[Branch]) -> StepPlan:
    """The plan of a batch, where the first sample of a part computes its trunk for all. Raises EvenloadError."""
    whole = chain.limits.whole_sequences
    uncut = tuple((plugin, config.uncut()) for plugin, config in chain.links)
    chain = replace(chain.of_groups(()), links=uncut, limits=replace(chain.limits, whole_sequences=True))
    trees, most = _trees_of(samples), chain.caps.max_tokens
    best: _Candidate | None = None
    least, tried = 1, 0
    while tried < len(samples):
        parts, least = _parts_under(trees, least, most), 2 * least
        if len(parts.firsts) == tried:
            continue
        tried, batch = len(parts.firsts), parts.lengths
        priced = chain.with_beside(_seconds_less(chain, trees, parts))
        if best is not None and priced.passes_bound_s(batch) + after_passes_s(priced.context) >= best.step_s:
            continue
        plan = priced.plan(batch)
        step_s = judge(plan, priced.context).step_s
        if best is None or step_s < best.step_s:
            best = _Candidate(step_s, parts, plan)
    assert best is not None
    plan = _of_samples(trees, best)
    return check(plan.revised(limits=replace(plan.limits, whole_sequences=whole)))


def plan_shared(chain: PlanChain, batch: Lengths, samples: Sequence[Branch]) -> StepPlan:
    """`plan_trees` of a batch, or its plan of rows where whole trees cannot be planned. Raises EvenloadError."""
    with suppress(EvenloadError):
        return plan_trees(chain, samples)
    return chain.plan(batch)


def _trees_of(samples: Sequence[Branch]) -> _Trees:
    of_tree: dict[Hashable, list[int]] = {}
    for number, sample in enumerate(samples):
        of_tree.setdefault(number if sample.tree is None else (sample.tree, sample.trunk), []).append(number)
    turned = (_in_turns(samples, tree) for tree in of_tree.values())
    trees = sorted(turned, key=lambda tree: [samples[number][:3] for number in tree])
    order = [number for tree in trees for number in tree]
    tokens, pairs, trunks = np.array([samples[number][:3] for number in order], dtype=np.int64).T
    sizes = np.array([*map(len, trees)])
    return _Trees(np.array(order), tokens, pairs, trunks[np.cumsum(sizes) - sizes], sizes)


def _in_turns(samples: Sequence[Branch], tree: list[int]) -> list[int]:
    """The longest sample of a tree, the shortest, the longest but one, ..."""
    falling = sorted(tree, key=lambda number: samples[number][:2], reverse=True)
    return [falling[-1 - place // 2 if place % 2 else place // 2] for place in range(len(tree))]


def _parts_under(trees: _Trees, least: int, most: int) -> _Parts:
    """Each tree in at least so many parts, of like numbers of samples and under a cap of tokens."""
    counts = np.minimum(least, trees.sizes)
    while True:
        parts = _cut(trees, counts)
        is_over = np.logical_or.reduceat(parts.lengths > most, np.cumsum(counts) - counts)
        more = is_over & (counts < trees.sizes)
        if not more.any():
            return parts
        counts = counts + more


def _cut(trees: _Trees, counts: Ints) -> _Parts:
    """Each tree in so many parts."""
    before = np.cumsum(trees.sizes) - trees.sizes
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first, size, count, trunk = (np.repeat(of_tree, counts) for of_tree in (before, trees.sizes, counts, trees.trunks))
    firsts = first + size * number // count
    sizes = np.diff(firsts, append=len(trees.samples))
    saved, readers = trunk * (sizes - 1), np.add.reduceat(trees.tokens, firsts) - trunk * sizes
    trunks = np.where((sizes > 1) & (saved * WORTH >= readers), trunk, 0)
    tokens = np.maximum(1, trees.tokens - np.repeat(trunks, sizes))
    tokens[firsts] = trees.tokens[firsts]
    return _Parts(firsts, sizes, trunks, tokens)


def _seconds_less(chain: PlanChain, trees: _Trees, parts: _Parts) -> Iterator[tuple[float, float]]:
    """What parts take compared with sequences so long: they have fewer pairs."""
    forward_s, backward_s = chain.context.costs.forward.pair_s, chain.context.costs.backward.pair_s
    again = (parts.sizes - 1) * parts.trunks * (parts.trunks + 1) / 2
    pairs = np.add.reduceat(trees.pairs, parts.firsts) - again
    less = np.minimum(0.0, pairs - parts.lengths * parts.lengths / 2)
    return zip((less * forward_s).tolist(), (less * backward_s).tolist(), strict=True)


def _of_samples(trees: _Trees, best: _Candidate) -> StepPlan:
    """The plan of samples in place of their parts; what bounds plans of these bounds none of others."""
    lengths, trunks = (np.empty(len(trees.samples), dtype=np.int64) for _ in range(2))
    lengths[trees.samples], trunks[trees.samples] = trees.tokens, trees.tokens - best.parts.tokens
    rows = zip(*(own[trees.samples].tolist() for own in (trunks, lengths)), strict=True)
    pieces = [Slice(number, *row) for number, row in zip(trees.samples.tolist(), rows, strict=True)]
    borders = [*best.parts.firsts.tolist(), len(pieces)]

    def of_samples(m: MicroBatch) -> MicroBatch:
        return m._replace(
            slices=tuple(x for s in m.slices for x in pieces[borders[s.sequence] : borders[s.sequence + 1]])
        )

    passes = {name: tuple(map(of_samples, getattr(best.plan, name))) for name in ("micro_batches", "backward")}
    shared = as_lengths(trunks) if trunks.any() else NO_TRUNKS
    return best.plan.revised(lengths=as_lengths(lengths), trunks=shared, bound_s=0.0, **passes)
