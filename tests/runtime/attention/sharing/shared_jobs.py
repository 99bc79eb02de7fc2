"""What the ranks of test_shared.py do: run a plan, or many, and compare with explicit softmax over whole sequences."""

from __future__ import annotations

import importlib.util
import random
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from evenload.core.errors import RankError
from evenload.core.plan.token_layout import tokens_of_ranks
from evenload.runtime.attention.attention import packed_attention
from evenload.runtime.attention.pack import build_pack
from evenload.runtime.attention.prefix import PrefixStore
from evenload.runtime.attention.sharing import gather, relayout, ring, running_job
from evenload.runtime.world.plane import Plane
from torch.utils.checkpoint import checkpoint

_spec = importlib.util.spec_from_file_location("shared_plans", Path(__file__).with_name("shared_plans.py"))
plans = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plans)

DIM, LAYERS = 4, 2


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
    repeat = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(repeat, dim=1) for t in leaves[1:])
    scores = torch.einsum("nhd,mhd->hnm", leaves[0], keys) * DIM**-0.5
    unseen = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    scores, sinks = scores.masked_fill(unseen, -torch.inf), sinks_of(layer, q.shape[1])
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
    out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1)[..., : len(q)], values)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def plain(q, k, v, pack, layer):
    sinks = sinks_of(layer, q.shape[1])
    return packed_attention(q, k, v, pack, layer, DIM**-0.5, sinks_H=None if sinks is None else sinks.to(q.dtype))


def reentrant(*arguments):
    return checkpoint(plain, *arguments, use_reentrant=True)


def non_reentrant(*arguments):
    return checkpoint(plain, *arguments, use_reentrant=False)


WRAPS = {"plain": plain, "reentrant": reentrant, "non-reentrant": non_reentrant, "replayed": plain}


def run_plan(arguments, how=None):
    """(worst relative error of out, dq, dk and dv; tokens that ran backward here).

    Args:
        arguments: of `plans.plan_of`, with both head counts in place of one.
        how: mode (of `WRAPS`), delay_s, dtype, layout (of `build_pack`).
    """
    mode, delay_s, dtype, layout = (
        {"mode": "plain", "delay_s": 0.0, "dtype": "float64", "layout": {}} | (how or {})
    ).values()
    plan, heads = plans.plan_of(*arguments[:3], arguments[3][0], *arguments[4:]), arguments[3]
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


def run_plans(seeds, num_ranks, modes):
    """Random plans, each in the next of the modes and with ranks that are late by chance."""
    found = {}
    for number, seed in enumerate(seeds):
        arguments, mode = plans.drawn(seed, num_ranks), modes[number % len(modes)]
        found[f"seed {seed}, {mode}"] = run_plan(
            arguments, {"mode": mode, "delay_s": 0.003, "layout": {"segment_multiple": 1 + seed % 3}}
        )
    return found


def lost_hop():
    tiles = ring.tiles
    return patch.object(
        ring, "tiles", lambda group, visitor, held: tiles(group, visitor, held) * (visitor != 0 or group == 0)
    )


def gradients_that_stay_away():
    """What other ranks found for the keys of this one does not come CP group."""
    exchange = running_job.RunningJob.exchange

    def drops(self, rows, sends, hop, kind):
        coming = exchange(self, rows, sends, hop, kind)
        if kind == 1 and (hop == self.groups - 1 or self.call.cp_comm == "all_gather"):
            for tensor in coming().values():
                tensor.zero_()
        return coming

    return patch.object(running_job.RunningJob, "exchange", drops)


def other_heads():
    """Keys and values of the heads of another rank."""
    heads_of = relayout.heads_of

    def wrong(share, shares, *counts):
        return heads_of(share, shares, *counts)._replace(keys=heads_of(shares - 1 - share, shares, *counts).keys)

    return patch.object(relayout, "heads_of", wrong)


def dropped_prefix():
    """Later chunks do not see what visitors hold of earlier slices."""
    tiles = ring.tiles
    return patch.object(ring, "tiles", lambda *at: [t for t in tiles(*at) if t.causal or t.first or at[1] < at[0]])


def unsettled_prefix():
    settle = PrefixStore.settle

    def forgets(self, layer, piece, dk, dv):
        own = settle(self, layer, piece, dk, dv)
        for entry in self._entries.values():
            entry.dk_PGD = entry.dv_PGD = None
        return own

    return patch.object(PrefixStore, "settle", forgets)


def chunks_in_disorder():
    in_order = gather._in_order
    return patch.object(
        gather,
        "_in_order",
        lambda brought, part: in_order(brought[::-1], part._replace(group_tokens=part.group_tokens[::-1])),
    )


def run_mutant(name, arguments):
    with globals()[name]():
        return run_plan(arguments)[0]


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
