"""Plans whose micro-batches are shared by ranks, some made by hand, others drawn from a seed; only laws shape them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.plan.token_layout import tokens_of_ranks
from megatron_tests.random_plans import regrouped, with_order

HAND_LENGTHS = (37, 64, 26, 29, 41, 9, 5, 2)
_APART = ", weights apart"
RING_LIKE = ("ring", "all_gather")
Hand = tuple[list[MicroBatch], bool | None]
"""Micro-batches, and whether they get an order; None: where there are several stages."""


def _limits(num_ranks: int, num_stages: int, layers_per_stage: int, **more: int) -> Limits:
    return Limits(num_ranks, 1 << 20, num_stages=num_stages, layers_per_stage=layers_per_stage, **more)


def by_hand(
    name: str, *, num_ranks: int = 4, num_stages: int = 1, layers_per_stage: int = 4, heads: int = 0
) -> StepPlan:
    """One of the plans below, of `HAND_LENGTHS`; they tell whether they have an order, or leave it to the stages."""
    whole = [Slice(i, 0, n) for i, n in enumerate(HAND_LENGTHS)]
    micro_batches, ordered = _HAND[name](whole)
    bare = StepPlan(
        as_lengths(HAND_LENGTHS),
        tuple(micro_batches),
        _limits(num_ranks, num_stages, layers_per_stage, heads=heads),
        made_by=name,
    )
    wanted = num_stages > 1 if ordered is None else ordered
    plan = with_order(bare, np.random.default_rng(1)) if wanted else bare
    return check(_apart(plan) if name.endswith(_APART) else plan)


def _apart(plan: StepPlan) -> StepPlan:
    """Every weight gradient is a pass of its own, two passes behind its backward or later."""
    orders = []
    for ops in plan.order:
        row = [*ops, *(Op("W", op.micro_batch) for op in ops if op.kind == "B")]
        late = {op: place + 2.5 for place, op in enumerate(ops)}
        orders.append(
            tuple(sorted(row, key=lambda op: late[Op("B", op.micro_batch)] if op.kind == "W" else late[op] - 2.5))
        )
    return replace(plan, order=tuple(orders), limits=replace(plan.limits, splits_backward=True))


def _mixed(cp_comm: str, ulysses_degree: int = 0) -> Any:
    """Jobs on {0,1,3}, {2}, {3,1,2}, {0,2} and all four; every rank runs another number of them."""

    def plan(whole: list[Slice]) -> Hand:
        def on(ranks: tuple[int, ...], *numbers: int) -> MicroBatch:
            shares = len(ranks) > 1
            # Groups of two divide four ranks only; the others are a ring then.
            fits = cp_comm != "hybrid" or len(ranks) == 4
            kind = (cp_comm if fits else "ring") if shares else ""
            return MicroBatch(
                tuple(whole[i] for i in numbers),
                ranks,
                cp_comm=kind,
                ulysses_degree=ulysses_degree * (kind == "hybrid"),
            )

        return [on((0, 1, 3), 0, 5), on((2,), 6), on((3, 1, 2), 2), on((0, 2), 3, 7), on((2, 0, 3, 1), 1, 4)], None

    return plan


def _zones(remap: bool) -> Any:
    """One micro-batch of long sequences on many ranks and short ones on one, as Zeppelin has it."""

    def plan(whole: list[Slice]) -> Hand:
        cp_groups = ((0, 1, 2, 3), (3, 2, 1, 0), (0, 1), (3, 2), (1, 3, 0), (2,), (2,), (0,))
        return [MicroBatch(tuple(whole), (0, 1, 2, 3), cp_comm="ring", cp_groups=cp_groups, remap=remap)], None

    return plan


def _chain(whole: list[Slice]) -> Hand:
    """A sequence in slices on three ranks beside short ones on one, and in their last pack together."""
    ranks = (2, 0, 3)
    last = MicroBatch((Slice(1, 40, 64), whole[5]), (0, 2, 3), cp_comm="ring", cp_groups=((2, 0, 3), (3,)))
    return [
        MicroBatch((Slice(1, 0, 24),), ranks, cp_comm="ring"),
        MicroBatch((whole[0], whole[6]), (1,)),
        MicroBatch((Slice(1, 24, 40), whole[4]), ranks, cp_comm="all_gather"),
        MicroBatch((whole[7], whole[3]), (0,)),
        last,
        MicroBatch((whole[2],), (1,)),
    ], True


def _growth(whole: list[Slice]) -> Hand:
    """A sequence that starts on one rank and grows to three, then four."""
    return [
        MicroBatch((Slice(1, 0, 20), whole[6]), (1,)),
        MicroBatch((whole[0],), (3, 0), cp_comm="all_to_all"),
        MicroBatch((Slice(1, 20, 44),), (1, 2, 0), cp_comm="ring"),
        MicroBatch((whole[2], whole[7]), (3,)),
        MicroBatch((Slice(1, 44, 64), whole[4]), (3, 1, 0, 2), cp_comm="ring"),
        MicroBatch((whole[3], whole[5]), (2,)),
    ], True


def _pairs(cp_comm: str) -> Any:
    """For a plane of two: shared and lonely micro-batches by turns, one sequence in slices."""

    def plan(whole: list[Slice]) -> Hand:
        return [
            MicroBatch((Slice(1, 0, 40), whole[7]), (1, 0), cp_comm=cp_comm),
            MicroBatch((whole[0],), (0,)),
            MicroBatch((whole[2], whole[5]), (1,)),
            MicroBatch((Slice(1, 40, 64),), (1, 0), cp_comm=cp_comm),
            MicroBatch((whole[3], whole[4]), (0, 1), cp_comm="all_to_all"),
            MicroBatch((whole[6],), (1,)),
        ], True

    return plan


def _together(whole: list[Slice]) -> Hand:
    """Every rank in every micro-batch, so that stages may leave the order to Megatron's 1F1B."""
    engines = ("ring", "all_gather", "all_to_all", "ring")
    groups = ((1, 7), (0, 5), (4,), (2, 3, 6))
    return [
        MicroBatch(tuple(whole[i] for i in group), (1, 0), cp_comm=cp_comm)  # type: ignore[arg-type]
        for cp_comm, group in zip(engines, groups, strict=True)
    ], False


_HAND = {
    "together": _together,
    "ring": _mixed("ring"),
    "all_gather": _mixed("all_gather"),
    "all_to_all": _mixed("all_to_all"),
    "hybrid": _mixed("hybrid", ulysses_degree=2),
    "zones": _zones(False),
    "zones, remap": _zones(True),
    "chain": _chain,
    "growth": _growth,
    "pairs, ring": _pairs("ring"),
    "pairs, all_to_all": _pairs("all_to_all"),
    **{f"pairs, {cp_comm}{_APART}": _pairs(cp_comm) for cp_comm in ("ring", "all_to_all")},
}


def in_turns(seed: int, *, num_ranks: int, heads: int = 0, recompute: bool = False, **sizes: int) -> StepPlan:
    """A drawn plan of `HAND_LENGTHS` most of whose micro-batches are two halves: slices of the first, of the second, or
    cut between them, also where a sequence is in slices already."""
    draw = np.random.default_rng(seed)
    plain = {"asymmetric": False, "replay": "none", "recompute": recompute, "pieces": (1, 1, 2)}
    whole = random_shared_plan(seed, HAND_LENGTHS, num_ranks=num_ranks, heads=heads, **plain, **sizes)
    able = replace(whole, limits=replace(whole.limits, takes_turns=True))
    halved = replace(able, micro_batches=tuple(_halved(draw, m) for m in able.micro_batches))
    return check(halved if whole.order else with_order(halved, draw))


def _halved(draw: np.random.Generator, m: MicroBatch) -> MicroBatch:
    cuts = len(m.slices) == 1 or draw.integers(2)
    for _ in range(0 if m.remap else 8):
        rows: tuple[Any, Any] = ([], [])
        for piece, ranks in zip(m.slices, m.ranks_of_slices, strict=True):
            least = 4 * len(ranks)
            if cuts and piece.length >= 2 * least and draw.integers(3):
                middle = piece.start + int(draw.integers(least, piece.length - least + 1))
                rows[0].append((piece._replace(stop=middle), ranks))
                rows[1].append((piece._replace(start=middle), ranks))
            else:
                rows[int(draw.integers(2))].append((piece, ranks))
        if all(rows):
            slices, groups = zip(*rows[0], *rows[1], strict=True)
            halved = m._replace(slices=slices, cp_groups=groups if m.cp_groups else (), first_half=len(rows[0]))
            if all(min(tokens_of_ranks(half).values()) for half in halved.halves):
                return halved
    return m


def random_shared_plan(
    seed: int,
    lengths: Any,
    *,
    num_ranks: int,
    num_stages: int,
    layers_per_stage: int,
    heads: int,
    asymmetric: bool | None = None,
    replay: str | None = None,
    recompute: bool | None = None,
    pieces: tuple[int, ...] = (1, 1, 2, 4),
) -> StepPlan:
    """A checked plan; what is None is drawn, too.

    Args:
        heads: of a tensor-parallel rank; never do more ranks share them.
        asymmetric: unshared sequences may be grouped and cut anew in the backward; then no CP group grows, and nothing
            is recomputed but by replays.
        replay: "none", "some" or "all".
        pieces: a sequence is cut into one of these numbers of slices, or fewer, so that all its ranks have tokens.
    """
    draw = np.random.default_rng(seed)
    replay = str(draw.choice(["none", "some", "all"])) if replay is None else replay
    asymmetric = draw.random() < 0.25 if asymmetric is None else asymmetric
    recompute = (bool(draw.integers(2)) if recompute is None else recompute) and not asymmetric
    chains = [_chain_of(draw, i, n, num_ranks, heads, pieces, grows=not asymmetric) for i, n in enumerate(lengths)]
    micro_batches = tuple(_packs(draw, chains, num_ranks))
    cut = any(len(chain) > 1 for chain in chains)
    backward = tuple(_regroup(draw, micro_batches, chains, lengths, pieces)) if asymmetric else ()
    share = {"none": 0.0, "some": 0.5, "all": 1.0}[replay]
    stored_forwards = set(micro_batches)
    groups = backward or micro_batches
    replayed = tuple(j for j, m in enumerate(groups) if m not in stored_forwards or draw.random() < share)
    shape = (num_stages, len(micro_batches))
    rows = draw.integers(0, layers_per_stage + 1, shape) if recompute else ()
    bare = StepPlan(
        as_lengths(lengths),
        micro_batches,
        _limits(num_ranks, num_stages, layers_per_stage, heads=heads, node_ranks=2),
        recompute=tuple(tuple(map(int, row)) for row in rows),
        made_by=f"seed {seed}",
        backward=backward,
        replayed=replayed,
    )
    ordered = cut or backward or replayed or num_stages > 1 or draw.integers(2)
    return check(with_order(bare, draw) if ordered else bare)


class _Part:
    """A slice with the CP group and the kind of cp_comm that it asks for."""

    def __init__(self, piece: Slice, cp_group: tuple[int, ...], kind: str) -> None:
        self.piece, self.cp_group, self.kind = piece, cp_group, kind


def _chain_of(
    draw: np.random.Generator,
    index: int,
    length: int,
    num_ranks: int,
    heads: int,
    pieces: tuple[int, ...],
    grows: bool,
) -> list[_Part]:
    """A sequence in slices of at least two tokens for each rank of the plane, on ranks that keep its prefix."""
    kinds = ["alone", "ring", "all_to_all", "hybrid"]
    if length < 2 * num_ranks:
        kinds = ["alone"]
    kind = str(draw.choice(kinds))
    sizes = {
        "alone": [1],
        "ring": range(2, num_ranks + 1),
        "all_to_all": range(2, min(heads, num_ranks) + 1),
        "hybrid": [4] if num_ranks >= 4 and heads >= 2 else [],
    }[kind]
    size = int(draw.choice(list(sizes) or [1]))
    kind = kind if size > 1 else "alone"
    cp_group = tuple(map(int, draw.permutation(num_ranks)[:size]))
    count = max(1, min(int(draw.choice(pieces)), length // (2 * num_ranks)))
    steps = draw.multinomial(length - count * 2 * num_ranks, [1 / count] * count) if count > 1 else [0]
    borders = np.cumsum([0, *(2 * num_ranks + s for s in steps)]).tolist() if count > 1 else [0, length]
    chain = []
    for a, b in pairwise(borders):
        if grows and kind in ("alone", "ring") and a and draw.random() < 0.5:  # the CP group grows, and turns
            more = [r for r in range(num_ranks) if r not in cp_group]
            cp_group = tuple(map(int, draw.permutation([*cp_group, *more[: int(draw.integers(len(more) + 1))]])))
        chain.append(_Part(Slice(index, a, b), cp_group, "ring" if kind == "alone" and len(cp_group) > 1 else kind))
    return chain


def _packs(draw: np.random.Generator, chains: list[list[_Part]], num_ranks: int) -> Iterator[MicroBatch]:
    """Groups of the first slices left of some sequences, until none is left."""
    left = [list(chain) for chain in chains]
    while any(left):
        heads = [chain for chain in left if chain]
        chosen = [heads[int(draw.integers(len(heads)))]]
        kind = chosen[0][0].kind
        alike = [c for c in heads if c is not chosen[0] and c[0].kind in (kind, "alone")]
        if kind == "alone":
            alike = [c for c in alike if c[0].cp_group == chosen[0][0].cp_group]
        chosen += [alike[i] for i in draw.permutation(len(alike))[: int(draw.integers(0, 4))]]
        yield _pack(draw, [chain.pop(0) for chain in chosen], kind, num_ranks)


def _pack(draw: np.random.Generator, parts: list[_Part], kind: str, num_ranks: int) -> MicroBatch:
    slices, cp_groups = tuple(p.piece for p in parts), tuple(p.cp_group for p in parts)
    if kind == "alone":
        return MicroBatch(slices, cp_groups[0])
    cp_comm = str(draw.choice(RING_LIKE)) if kind == "ring" else kind
    common = {"cp_comm": cp_comm, "ulysses_degree": 2 if kind == "hybrid" else 0, "routed": bool(draw.integers(2))}
    ranks = cp_groups[0]
    if len(set(cp_groups)) > 1:
        ranks = tuple(map(int, draw.permutation(sorted({r for cp_group in cp_groups for r in cp_group}))))
        common["cp_groups"] = cp_groups
    remap = bool(draw.random() < 0.4) and sum(s.length for s in slices) >= num_ranks
    if remap and draw.integers(2):  # ranks that are nobody's CP group do the other modules' work only
        idle = [r for r in range(num_ranks) if r not in ranks]
        common["cp_groups"] = cp_groups
        ranks = (*ranks, *idle)
    return MicroBatch(slices, ranks, remap=remap, **common)


def _regroup(
    draw: np.random.Generator,
    forward: tuple[MicroBatch, ...],
    chains: list[list[_Part]],
    lengths: Any,
    pieces: tuple[int, ...],
) -> Iterator[MicroBatch]:
    """The backward: what has to do with a shared micro-batch, over any number of others, stays as it was."""
    fixed: set[int] = set()
    tied = [{s.sequence for s in m.slices} for m in forward]
    grown = {i for m, ids in zip(forward, tied, strict=True) if len(m.ranks) > 1 for i in ids}
    while grown - fixed:
        fixed |= grown
        grown = {i for ids in tied if ids & fixed for i in ids}
    cuts = {i: [part.piece for part in chain] for i, chain in enumerate(chains)}
    ranks = [chain[0].cp_group[0] for chain in chains]
    return regrouped(draw, list(forward), cuts, lengths, ranks, pieces, frozenset(fixed))


def swapped(plan: StepPlan, first: int, second: int) -> StepPlan:
    """The same work with two micro-batches in each other's place: what a rank must not walk alone."""
    row = list(plan.micro_batches)
    row[first], row[second] = row[second], row[first]
    return replace(plan, micro_batches=tuple(row))
