"""What the ranks of test_shared.py do: run a plan, or many, and compare with explicit softmax over whole sequences."""

import random
import time
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
import torch.distributed as dist
from evenload.core.errors import RankError
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.plan.token_layout import tokens_of_ranks
from evenload.runtime.attention.attention import packed_attention
from evenload.runtime.attention.pack import build_pack
from evenload.runtime.attention.prefix import PrefixStore
from evenload.runtime.attention.sharing import gather, relayout, ring, running_job
from evenload.runtime.world.plane import Plane
from harness.attention import attention
from harness.proof.drawn import random_shared_plan
from harness.proof.faults import around, fault
from torch.utils.checkpoint import checkpoint

DIM, LAYERS = 4, 2


def plan_of(lengths, rows, num_ranks, heads, node_ranks=0):
    """The plan of `micro_batch` rows: all forwards, then all backwards."""
    tuples = [{name: tuple(map(tuple, row.get(name, ()))) for name in ("slices", "cp_groups")} for row in rows]
    micro_batches = tuple(
        MicroBatch(**row | of | {"slices": tuple(Slice(*s) for s in of["slices"]), "ranks": tuple(row["ranks"])})
        for row, of in zip(rows, tuples, strict=True)
    )
    count = len(rows)
    ops = (*(Op("F", i) for i in range(count)), *(Op("B", i) for i in reversed(range(count))))
    limits = Limits(num_ranks, 10_000, heads=heads, node_ranks=node_ranks)
    return check(StepPlan(as_lengths(lengths), micro_batches, limits, (ops,)))


def micro_batch(slices, ranks, cp_comm="ring", **more):
    """As JSON takes it."""
    return {"slices": slices, "ranks": ranks, "cp_comm": cp_comm if len(ranks) > 1 else "", **more}


def drawn(seed, num_ranks):
    """A random plan in which some micro-batch is shared, and its heads of queries and keys."""
    chance = random.Random(seed)
    heads = chance.choice([[8, 2], [4, 4], [6, 3], [5, 1]])
    while True:
        lengths = [chance.randint(1, 60) for _ in range(chance.randint(1, 5))]
        sizes = {"num_ranks": num_ranks, "num_stages": 1, "layers_per_stage": 1, "heads": heads[0]}
        bare = {"asymmetric": False, "replay": "none", "recompute": False}
        plan = random_shared_plan(chance.randrange(1 << 30), lengths, **sizes, **bare)
        if plan.shared and plan.order:
            return plan, heads


def tensors_of(sequence, length, layer, heads):
    """q, k, v and dout of one sequence in one layer, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * sequence + layer)
    counts = heads[0], heads[1], heads[1], heads[0]
    return [torch.randn(length, n, DIM, generator=generator, dtype=torch.float64) for n in counts]


def sinks_of(layer, heads):
    """Scores of no key, which the second layer has."""
    return torch.linspace(-1.0, 2.0, heads, dtype=torch.float64) if layer else None


def dense(q, k, v, dout, layer):
    """out, dq, dk, dv of one whole sequence."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, _ = attention(*leaves, DIM**-0.5, sinks_H=sinks_of(layer, q.shape[1]))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def plain(q, k, v, pack, layer):
    sinks = sinks_of(layer, q.shape[1])
    return packed_attention(q, k, v, pack, layer, DIM**-0.5, sinks_H=None if sinks is None else sinks.to(q.dtype))


WRAPS = {
    "plain": plain,
    "reentrant": partial(checkpoint, plain, use_reentrant=True),
    "non-reentrant": partial(checkpoint, plain, use_reentrant=False),
    "replayed": plain,
}


def run_rows(lengths, rows, num_ranks, heads, node_ranks, how):
    return run(plan_of(lengths, rows, num_ranks, heads[0], node_ranks), heads, **how)


def run(plan, heads, mode="plain", delay_s=0.0, dtype="float64", layout=MappingProxyType({})):
    """(worst relative error of out, dq, dk and dv; tokens that ran backward here).

    Args:
        mode: of `WRAPS`.
        layout: of `build_pack`.
    """
    rank, lengths = dist.get_rank(), plan.lengths.tolist()
    plane = Plane.make([tuple(range(plan.limits.num_ranks))], plan.limits.node_ranks)
    store = PrefixStore.of_plan(plan, rank)
    live, worst, ran = {}, [0.0] * 4, 0
    for kind, index in plan.order[0]:
        micro_batch = plan.micro_batches[index]
        if rank not in micro_batch.ranks:
            continue
        time.sleep(random.random() * delay_s)
        if len(micro_batch.ranks) > 1:
            plane.meet(index, plan.digest, micro_batch.ranks, kind)
        if kind == "F":
            pack = build_pack(micro_batch, lambda i: np.zeros(lengths[i]), prefix=store, plane=plane, **layout)
            assert sum(piece.length for piece in pack.slices) == tokens_of_ranks(micro_batch)[rank]
            inputs = [inputs_of(pack, layer, lengths, heads, getattr(torch, dtype)) for layer in range(LAYERS)]
            with torch.set_grad_enabled(mode != "replayed"):
                outs = [WRAPS[mode](*inputs[layer][:3], pack, layer) for layer in range(LAYERS)]
            live[index] = pack, inputs, outs
            continue
        pack, inputs, outs = live.pop(index)
        if mode == "replayed":
            outs = [plain(*inputs[layer][:3], pack, layer) for layer in range(LAYERS)]
        ran += sum(piece.length for piece in pack.slices)
        for layer in reversed(range(LAYERS)):
            *leaves, dout = inputs[layer]
            outs[layer].backward(dout)
            found = [outs[layer].detach(), *(t.grad for t in leaves)]
            worst = [max(pair) for pair in zip(worst, errors(found, pack, layer, lengths, heads), strict=True)]
    if store is not None:
        store.check_empty()
    plane.close()
    return worst, ran


def inputs_of(pack, layer, lengths, heads, dtype):
    """q, k, v and dout of the pack's slots; padding holds what must not be seen."""
    packed = []
    for kind, count in enumerate((heads[0], heads[1], heads[1], heads[0])):
        t = torch.full((pack.num_padded_tokens, count, DIM), torch.nan, dtype=torch.float64)
        for piece, first in zip(pack.slices, pack.segments, strict=False):
            whole = tensors_of(piece.sequence, lengths[piece.sequence], layer, heads)[kind]
            t[first : first + piece.length] = whole[piece.start : piece.stop]
        packed.append(t.to(dtype))
    return [*(t.requires_grad_() for t in packed[:3]), packed[3]]


_wanted = {}


def errors(found, pack, layer, lengths, heads):
    worst = [0.0] * 4
    for piece, first in zip(pack.slices, pack.segments, strict=False):
        key = piece.sequence, lengths[piece.sequence], layer, tuple(heads)
        if key not in _wanted:
            _wanted[key] = dense(*tensors_of(*key), layer)
        for i, t in enumerate(found):
            off = (t[first : first + piece.length] - _wanted[key][i][piece.start : piece.stop]).abs().max()
            # The queries and keys of a sequence of one token have no gradient but rounding.
            worst[i] = max(worst[i], (off / _wanted[key][i].abs().max().clamp(min=1e-3)).item())
    return worst


def run_drawn(seeds, num_ranks):
    """What `run` found for each seed and mode, and the lengths: ranks are late by chance."""
    found = {}
    for number, seed in enumerate(seeds):
        plan, heads = drawn(seed, num_ranks)
        mode, layout = sorted(WRAPS)[number % len(WRAPS)], {"segment_multiple": 1 + seed % 3}
        found[f"seed {seed}, {mode}"] = run(plan, heads, mode, 0.003, layout=layout), plan.lengths.tolist()
    return found


def drops(exchange, job, rows, sends, hop, kind):
    coming = exchange(job, rows, sends, hop, kind)
    if kind == 1 and (hop == job.groups - 1 or job.call.cp_comm == "all_gather"):
        for tensor in coming().values():
            tensor.zero_()
    return coming


def heads_of_another(heads_of, share, shares, *counts):
    return heads_of(share, shares, *counts)._replace(keys=heads_of(shares - 1 - share, shares, *counts).keys)


def in_disorder(in_order, brought, part):
    return in_order(brought[::-1], part._replace(group_tokens=part.group_tokens[::-1]))


FAULTS = {
    "lost hop": lambda: around(
        ring, "tiles", lambda tiles, group, visitor, held: tiles(group, visitor, held) * (visitor != 0 or group == 0)
    ),
    # What other ranks found for the keys of this one does not come back.
    "gradients that stay away": lambda: around(running_job.RunningJob, "exchange", drops),
    "other heads": lambda: around(relayout, "heads_of", heads_of_another),
    # Later chunks do not see what visitors hold of earlier slices.
    "dropped prefix": lambda: around(
        ring, "tiles", lambda tiles, *at: [t for t in tiles(*at) if t.causal or t.first or at[1] < at[0]]
    ),
    "unsettled prefix": fault("dropped accumulator"),
    "chunks in disorder": lambda: around(gather, "_in_order", in_disorder),
}


def run_mutant(name, *arguments):
    with FAULTS[name]():
        return run_rows(*arguments, {})[0]


def meets(numbers, kinds):
    """What a rank hears at the start of a pass, where each names its own; '' where they agree."""
    rank = dist.get_rank()
    plane = Plane.make([tuple(range(dist.get_world_size()))])
    try:
        plane.meet(numbers[rank], b"0123456789abcdef", plane.ranks, kinds[rank])
        told = ""
    except RankError as error:
        told = str(error)
    dist.barrier()
    plane.close()
    return told
