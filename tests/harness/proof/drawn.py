"""Plans drawn from a seed: cuts, packs, replays, recomputation and orders; micro-batches that ranks share.

Only the laws are asked of these plans; no planner would make most of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths

LENGTHS = (37, 64, 26, 29, 41, 9, 5, 2)
"""Of the batch that plans are made of unless a test has another."""
RING_LIKE = ("ring", "all_gather")


def random_plan(
    seed: int,
    lengths: Any,
    *,
    num_ranks: int,
    num_stages: int,
    layers_per_stage: int,
    asymmetric: bool | None = None,
    replay: str | None = None,
    recompute: bool | None = None,
    pieces: tuple[int, ...] = (1, 1, 2, 3, 16),
    pad: bool = False,
    idle: tuple[int, ...] = (),
    layers: tuple[int, ...] = (),
) -> StepPlan:
    """A checked plan; what is None is drawn, too.

    Args:
        replay: "none", "some" or "all"; an asymmetric plan replays whatever has no twin in the forward besides.
        recompute: with numbers of recomputed layers per stage and micro-batch (never in asymmetric plans).
        pieces: a sequence is cut into one of these numbers of slices, or one per token where it has fewer.
        pad: pad slices to the longest of their micro-batch.
        idle: plane ranks without any work; they run a dummy in half of the plans that have one order of both passes.
        layers: of each stage, where they are unequal; ``layers_per_stage`` are the most.
    """
    draw = np.random.default_rng(seed)
    asymmetric = bool(draw.integers(2)) if asymmetric is None else asymmetric
    replay = str(draw.choice(["none", "some", "all"])) if replay is None else replay
    recompute = bool(draw.integers(2)) if recompute is None else recompute
    busy = [rank for rank in range(num_ranks) if rank not in idle]
    rank_of = [int(draw.choice(busy)) for _ in lengths]
    cuts = {i: _cut(draw, i, n, pieces) for i, n in enumerate(lengths)}
    forward = list(_packs(draw, cuts, rank_of))
    if not asymmetric and draw.integers(2):
        forward += [MicroBatch((), (rank,)) for rank in idle]
    backward = list(regrouped(draw, forward, cuts, lengths, rank_of, pieces)) if asymmetric else []
    if pad:
        forward, backward = [_padded(m) for m in forward], [_padded(m) for m in backward]
    stored_forwards = set(forward)
    share = {"none": 0.0, "some": 0.5, "all": 1.0}[replay]
    groups = backward or forward
    replayed = tuple(j for j, m in enumerate(groups) if m not in stored_forwards or draw.random() < share)
    recomputed: tuple[tuple[int, ...], ...] = ()
    if recompute and not asymmetric:
        shape = (num_stages, len(forward))
        most = np.array(layers or (layers_per_stage,) * num_stages)[:, None]
        recomputed = tuple(tuple(map(int, row)) for row in draw.integers(0, layers_per_stage + 1, shape).clip(max=most))
    bare = StepPlan(
        as_lengths(lengths),
        tuple(forward),
        Limits(num_ranks, 1 << 20, num_stages=num_stages, layers_per_stage=layers_per_stage, layers=layers),
        recompute=recomputed,
        made_by=f"seed {seed}",
        backward=tuple(backward),
        replayed=replayed,
    )
    return check(with_order(bare, draw))


def with_order(bare: StepPlan, draw: np.random.Generator) -> StepPlan:
    """The plan with a random order for each stage: stages run whatever is ready, by lot."""
    forward, backward = len(bare.micro_batches), _backward_order(bare, draw)
    needs = _needs(bare)
    stages = bare.limits.num_stages
    done: list[set[Op]] = [set() for _ in range(stages)]
    orders: list[list[Op]] = [[] for _ in range(stages)]
    eager = draw.random()
    while any(len(order) < forward + len(backward) for order in orders):
        stage = int(draw.integers(stages))
        ready = []
        at_f = sum(op.kind == "F" for op in orders[stage])
        at_b = len(orders[stage]) - at_f
        if at_f < forward:
            op = Op("F", at_f)
            ready += [op] * (stage == 0 or op in done[stage - 1])
        if at_b < len(backward):
            op = Op("B", backward[at_b])
            arrived = stage == stages - 1 or op in done[stage + 1]
            ready += [op] * (arrived and needs[op.micro_batch] <= done[stage])
        if ready:
            op = ready[-1] if draw.random() < eager else ready[0]
            orders[stage].append(op)
            done[stage].add(op)
    return replace(bare, order=tuple(map(tuple, orders)))


def _padded(micro_batch: MicroBatch) -> MicroBatch:
    return micro_batch._replace(pad_to=max((s.length for s in micro_batch.slices), default=0))


def _cut(draw: np.random.Generator, index: int, length: int, pieces: tuple[int, ...]) -> list[Slice]:
    """A sequence in slices of any lengths."""
    count = min(length, int(draw.choice(pieces)))
    cuts = sorted(map(int, draw.choice(np.arange(1, length), count - 1, replace=False))) if count > 1 else []
    borders = [0, *cuts, length]
    return [Slice(index, a, b) for a, b in pairwise(borders)]


def _packs(draw: np.random.Generator, chains: dict[int, list[Slice]], rank_of: list[int]) -> Iterator[MicroBatch]:
    """Groups of the first slices left of some sequences of a rank, until none is left."""
    left = {index: list(chain) for index, chain in chains.items()}
    while any(left.values()):
        rank = int(draw.choice(sorted({rank_of[i] for i, chain in left.items() if chain})))
        heads = [i for i, chain in left.items() if chain and rank_of[i] == rank]
        chosen = draw.choice(heads, int(draw.integers(1, min(4, len(heads)) + 1)), replace=False)
        yield MicroBatch(tuple(left[int(i)].pop(0) for i in chosen), (rank,))


def regrouped(
    draw: np.random.Generator,
    forward: list[MicroBatch],
    cuts: dict[int, list[Slice]],
    lengths: Any,
    rank_of: list[int],
    pieces: tuple[int, ...],
    fixed: frozenset[int] = frozenset(),
) -> Iterator[MicroBatch]:
    """Backward groups: some sequences keep their cuts, some are cut anew; whole packs may stay as they were.

    ``fixed`` sequences share packs with nobody else, and those stay.
    """
    anew = {i for i in cuts if i not in fixed and draw.random() < 0.5}
    held = [m for m in forward if not any(s.sequence in anew for s in m.slices)]
    stays = [m for m in held if any(s.sequence in fixed for s in m.slices) or draw.random() < 0.7]
    pack_of = {s: m for m in stays for s in m.slices}
    left = {i: (_cut(draw, i, lengths[i], pieces) if i in anew else list(chain)) for i, chain in cuts.items()}
    while any(left.values()):
        tails = {i: chain[-1] for i, chain in left.items() if chain}
        whole = [m for m in stays if all(tails.get(s.sequence) == s for s in m.slices)]
        loose = [i for i, s in tails.items() if s not in pack_of]
        if whole and (not loose or draw.random() < 0.5):
            pack = whole[int(draw.integers(len(whole)))]
        else:
            rank = rank_of[int(draw.choice(loose))]
            heads = [i for i in loose if rank_of[i] == rank]
            chosen = draw.choice(heads, int(draw.integers(1, min(4, len(heads)) + 1)), replace=False)
            pack = MicroBatch(tuple(tails[int(i)] for i in chosen), (rank,))
        for s in pack.slices:
            left[s.sequence].pop()
        yield pack


def _needs(plan: StepPlan) -> dict[int, set[Op]]:
    """The forwards that each backward waits for: its own or its twin's, and those of its chains."""
    chains: dict[int, set[Op]] = {}
    for i, m in enumerate(plan.micro_batches):
        for s in m.slices:
            chains.setdefault(s.sequence, set()).add(Op("F", i))
    found = {}
    for j, m in enumerate(plan.passes("B")):
        stored_forward = plan.forward_of[j]
        own = (
            {Op("F", j if stored_forward is None else stored_forward)}
            if stored_forward is not None or not plan.backward
            else set()
        )
        found[j] = own.union(*(chains[s.sequence] for s in m.slices if plan.backward or s.sequence in plan.cut))
    return found


def _backward_order(plan: StepPlan, draw: np.random.Generator) -> list[int]:
    """A random order of the backward in which the slices of every sequence descend; launch order where it is given."""
    if plan.backward:
        return list(range(len(plan.backward)))
    left = set(range(len(plan.micro_batches)))
    after: dict[int, set[int]] = {i: set() for i in left}
    last: dict[int, int] = {}
    for i, m in enumerate(plan.micro_batches):
        for s in m.slices:
            if s.sequence in last:
                after[last[s.sequence]].add(i)
            last[s.sequence] = i
    order: list[int] = []
    while left:
        ready = sorted(i for i in left if not after[i] & left)
        order.append(ready[int(draw.integers(len(ready)))])
        left.remove(order[-1])
    return order


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
    micro_batches = tuple(_shared_packs(draw, chains, num_ranks))
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
        Limits(num_ranks, 1 << 20, num_stages, layers_per_stage, heads=heads, node_ranks=2),
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


def _shared_packs(draw: np.random.Generator, chains: list[list[_Part]], num_ranks: int) -> Iterator[MicroBatch]:
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
