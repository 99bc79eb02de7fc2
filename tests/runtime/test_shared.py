"""Attention that ranks share against explicit softmax over whole sequences: float64, real gloo ranks, any plan."""

import random
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from evenload.core.workload import Limits, MicroBatch, Op, Slice, StepPlan, sequences
from evenload.runtime.attention import packed_attention
from evenload.runtime.pack import build_pack
from evenload.runtime.plane import Plane
from evenload.runtime.prefix import PrefixStore

pytestmark = pytest.mark.slow

DIM, LAYERS = 4, 2
KINDS = ("q", "k", "v", "dout")


def tensors_of(sequence, length, layer, heads):
    """q, k, v and dout of one sequence in one layer, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * sequence + layer)
    counts = heads[0], heads[1], heads[1], heads[0]
    return [torch.randn(length, n, DIM, generator=generator, dtype=torch.float64) for n in counts]


def dense(q, k, v, dout):
    """out, dq, dk, dv of one whole sequence."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    repeat = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(repeat, dim=1) for t in leaves[1:])
    scores = torch.einsum("nhd,mhd->hnm", leaves[0], keys) * DIM**-0.5
    unseen = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    out = torch.einsum("hnm,mhd->nhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), values)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def plan_of(lengths, micro_batches, num_ranks, heads=0, node_ranks=0, order=None):
    limits = Limits(num_ranks, 10_000, heads=heads, node_ranks=node_ranks)
    count = len(micro_batches)
    order = order or [Op("F", i) for i in range(count)] + [Op("B", i) for i in reversed(range(count))]
    return StepPlan(sequences(lengths), tuple(micro_batches), limits, (tuple(order),)).check()


def lived(encoded):
    """A plan out of what JSON made of it."""
    lengths, rows, num_ranks, heads, node_ranks, order = encoded
    micro_batches = [
        MicroBatch(
            **{
                **row,
                "slices": tuple(Slice(*s) for s in row["slices"]),
                "ranks": tuple(row["ranks"]),
                "homes": tuple(map(tuple, row.get("homes", ()))),
            }
        )
        for row in rows
    ]
    return plan_of(
        lengths, micro_batches, num_ranks, heads[0], node_ranks, [Op(*op) for op in order] if order else None
    )


def runs(encoded, how=None):
    """Run a plan on this rank: (worst error of out, dq, dk and dv; tokens that ran)."""
    how = how or {}
    plan, heads = lived(encoded), encoded[3]
    rank, lengths = dist.get_rank(), [s.length for s in plan.sequences]
    plane = Plane.make([tuple(range(plan.limits.num_ranks))], plan.limits.node_ranks)
    store = PrefixStore.of_plan(plan, rank)
    wanted = {
        (s, layer): dense(*tensors_of(s, n, layer, heads)) for s, n in enumerate(lengths) for layer in range(LAYERS)
    }
    live, worst, ran = {}, [0.0] * 4, 0
    for kind, index in plan.order[0]:
        micro_batch = plan.micro_batches[index]
        if rank not in micro_batch.ranks:
            continue
        if how.get("delay"):
            time.sleep(random.random() * how["delay"])
        if len(micro_batch.ranks) > 1:
            plane.meet(index, plan.digest, micro_batch.ranks, kind)
        if kind == "F":
            pack = build_pack(
                micro_batch, lambda i: np.zeros(lengths[i]), prefix=store, plane=plane, **how.get("layout", {})
            )
            live[index] = pack, [forward(pack, layer, lengths, heads) for layer in range(LAYERS)]
            continue
        pack, layers = live.pop(index)
        ran += sum(piece.length for piece in pack.slices)
        for layer in reversed(range(LAYERS)):
            leaves, out, dout = layers[layer]
            found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
            for piece, first in zip(pack.slices, pack.segments, strict=False):
                for i, t in enumerate(found):
                    want = wanted[piece.sequence, layer][i]
                    off = (t[first : first + piece.length] - want[piece.start : piece.stop]).abs().max()
                    worst[i] = max(worst[i], (off / want.abs().max()).item())
    if store is not None:
        store.check_empty()
    plane.close()
    return worst, ran


def forward(pack, layer, lengths, heads):
    packed = []
    for kind, count in enumerate((heads[0], heads[1], heads[1], heads[0])):
        t = torch.zeros(pack.num_slots, count, DIM, dtype=torch.float64)
        for piece, first in zip(pack.slices, pack.segments, strict=False):
            whole = tensors_of(piece.sequence, lengths[piece.sequence], layer, heads)[kind]
            t[first : first + piece.length] = whole[piece.start : piece.stop]
        packed.append(t)
    leaves = [t.requires_grad_() for t in packed[:3]]
    return leaves, packed_attention(*leaves, pack, layer, DIM**-0.5), packed[3]


def whole(lengths):
    return [[i, 0, n] for i, n in enumerate(lengths)]


def micro_batch(slices, ranks, engine="ring", **more):
    return {"slices": slices, "ranks": ranks, "engine": engine if len(ranks) > 1 else "", **more}


def check(world, lengths, micro_batches, num_ranks, heads=(4, 2), node_ranks=0, order=None, **how):
    results = world(num_ranks).run(runs, [lengths, micro_batches, num_ranks, list(heads), node_ranks, order], how)
    assert sum(ran for _, ran in results) == sum(lengths)
    worst = [max(column) for column in zip(*(errors for errors, _ in results), strict=True)]
    assert max(worst) < 1e-12, dict(zip(("out", "dq", "dk", "dv"), worst, strict=True))


def test_a_ring_of_any_ranks(world):
    lengths = [37, 5, 24, 9, 11]
    check(
        world,
        lengths,
        [
            micro_batch(whole(lengths)[:2], [2, 0, 1]),
            micro_batch([[2, 0, 24]], [0, 2]),
            micro_batch(whole(lengths)[3:], [1]),
        ],
        3,
    )


def test_homes_of_different_sizes(world):
    lengths = [40, 12, 9, 30, 3]
    check(world, lengths, [micro_batch(whole(lengths), [0, 1, 2], homes=[[0, 1, 2], [1], [0], [2, 1], [2]])], 3)


def cut(lengths, *stops):
    """Slices of sequence 0 that end at these tokens."""
    return [[0, a, b] for a, b in pairwise([0, *stops, lengths[0]])]


def test_slices_of_a_shared_sequence(world):
    lengths = [61, 8, 5]
    a, b, c = cut(lengths, 20, 33)
    homes = [[0, 2, 1], [1]]
    rows = [
        micro_batch([a, [1, 0, 8]], [0, 1, 2], homes=homes),
        micro_batch([b], [2, 1, 0]),
        micro_batch([[2, 0, 5], c], [1, 0, 2]),
    ]
    check(world, lengths, rows, 3)


def test_a_ring_that_grows(world):
    lengths = [61, 8]
    a, b, c = cut(lengths, 20, 33)
    rows = [micro_batch([a], [1]), micro_batch([[1, 0, 8], b], [2, 1]), micro_batch([c], [1, 0, 2])]
    check(world, lengths, rows, 3)


@pytest.mark.parametrize(("heads", "ranks"), [((8, 2), 3), ((8, 2), 4), ((6, 3), 4), ((4, 4), 3), ((5, 1), 3)])
def test_heads_are_shared(world, heads, ranks):
    lengths = [37, 5, 24, 2]
    rows = [micro_batch(whole(lengths), list(range(ranks)), "all_to_all")]
    check(world, lengths, rows, ranks, heads)


def test_heads_are_shared_by_homes_of_different_sizes(world):
    lengths = [37, 5, 24, 2, 13]
    homes = [[3, 1, 0], [2], [1, 2], [0], [0, 1, 2, 3]]
    check(world, lengths, [micro_batch(whole(lengths), [0, 1, 2, 3], "all_to_all", homes=homes)], 4, (8, 2))


def test_slices_whose_heads_are_shared(world):
    lengths = [61, 8, 5]
    a, b, c = cut(lengths, 20, 33)
    rows = [
        micro_batch([a, [1, 0, 8]], [0, 1, 2], "all_to_all"),
        micro_batch([b], [0, 1, 2], "all_to_all"),
        micro_batch([[2, 0, 5], c], [0, 1, 2], "all_to_all"),
    ]
    check(world, lengths, rows, 3, (8, 2))


def test_a_ring_of_groups_that_share_heads(world):
    lengths = [61, 8, 5, 17]
    a, b, c = cut(lengths, 20, 33)
    homes = [[1, 0, 2, 3], [1], [3, 2]]
    rows = [
        micro_batch([a, [1, 0, 8], [3, 0, 17]], [0, 1, 2, 3], "hybrid", inner=2, homes=homes),
        micro_batch([b], [1, 0, 2, 3], "hybrid", inner=2),
        micro_batch([[2, 0, 5], c], [1, 0, 2, 3], "hybrid", inner=2),
    ]
    check(world, lengths, rows, 4, (6, 2))


@pytest.mark.parametrize("engine", ["ring", "all_to_all", "all_gather"])
def test_tokens_are_evened(world, engine):
    lengths = [61, 8, 5, 17]
    a, b, c = cut(lengths, 20, 33)
    homes = [[0, 2], [1], [1]]
    rows = [
        micro_batch([a, [1, 0, 8], [3, 0, 17]], [0, 1, 2, 3], engine, homes=homes, remap=True),
        micro_batch([b], [0, 2], engine, remap=True),
        micro_batch([[2, 0, 5], c], [0, 1, 2], engine, remap=True, homes=[[1], [0, 2]]),
    ]
    check(world, lengths, rows, 4, (8, 2))


def test_keys_are_gathered(world):
    lengths = [61, 8, 5, 17]
    a, b, c = cut(lengths, 20, 33)
    homes = [[0, 2], [1], [2, 3, 1]]
    rows = [
        micro_batch([a, [1, 0, 8], [3, 0, 17]], [0, 1, 2, 3], "all_gather", homes=homes),
        micro_batch([b], [2, 1, 0], "all_gather"),
        micro_batch([[2, 0, 5], c], [1, 0, 2, 3], "all_gather"),
    ]
    check(world, lengths, rows, 4, (8, 2))


@pytest.mark.parametrize("engine", ["ring", "all_gather", "hybrid"])
def test_messages_between_nodes_are_spread(world, engine):
    lengths = [61, 8, 5, 17]
    a, b, c = cut(lengths, 20, 33)
    homes = [[1, 3, 2, 0], [1], [2, 3]]
    more = {"routed": True, "inner": 2 if engine == "hybrid" else 0}
    rows = [
        micro_batch([a, [1, 0, 8], [3, 0, 17]], [0, 1, 2, 3], engine, homes=homes, **more),
        micro_batch([b], [1, 3, 2, 0], engine, **more),
        micro_batch([[2, 0, 5], c], [1, 3, 2, 0], engine, **more),
    ]
    check(world, lengths, rows, 4, (6, 2), node_ranks=2)
    if engine != "hybrid":
        check(world, [41], [micro_batch(whole([41]), [2, 0, 3], engine, **more)], 4, node_ranks=2)
