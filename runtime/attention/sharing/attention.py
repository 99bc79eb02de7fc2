"""Attention of a micro-batch that several ranks share: one autograd node for each layer and pack.

Shape legend: T = slots of the pack, N = tokens that a job attends for here, H = query heads, G = key/value heads,
D = head dimension.

The node takes the pack's queries, keys and values to the ranks that attend for them (`relayout`), runs the jobs of the
micro-batch in turn (`running_job`), and brings the output back; its backward does the same with gradients. It keeps q,
out and the log-sum-exp of each query, and K and V of uncut slices, all of this rank. What a replay needs travels with
the pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....core.errors import EvenloadError
from ..blocks import choose_block, gradient_of_sinks
from ..scores import ScoreForm
from .gather import Gather
from .jobs import CpGroupJob
from .relayout import Relayout, TensorSpec
from .ring import Ring
from .running_job import AttentionCall, RunningJob, in_turn
from .shared import Shared


def shared_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, shared: Shared, layer: int, scores: ScoreForm
) -> Tensor:
    """`packed_attention` of a pack whose micro-batch is shared; every rank of it calls this, layer by layer.

    Raises EvenloadError for a window where keys of a sequence lie on several ranks.
    """
    window, sinks_H = scores.window, scores.sinks_H
    if window is not None and any(job.cp_group.groups > 1 for job in shared.jobs):
        raise EvenloadError(
            "ranks do not share the keys of a sequence under a sliding window",
            f"a window of {window} tokens in layer {layer}, {shared.micro_batch.cp_comm} on {shared.micro_batch.ranks}",
            "disable plugins.mesh, or let ranks share heads (mesh.cp_comm all_to_all)",
        )
    inputs = q_THD, k_TGD, v_TGD, sinks_H
    frozen = torch.is_grad_enabled() and not any(x is not None and x.requires_grad for x in inputs)
    block = choose_block(q_THD.device, q_THD.dtype, q_THD.shape[-1], scores.options & {"window", "softcap"})
    heads = q_THD.shape[1], k_TGD.shape[1]
    cp_comm, routed = shared.micro_batch.cp_comm, shared.micro_batch.routed
    call = AttentionCall(
        shared.plane, shared.store, layer, scores.scale, block, frozen, heads, cp_comm, routed, window, scores.softcap
    )
    relayout = shared.relayout(heads, q_THD.device)
    jobs = [job for job in shared.jobs if job.number in relayout.counts]
    out: Tensor = _SharedAttention.apply(*inputs, call, relayout, jobs)  # type: ignore[no-untyped-call]
    return out


def _algorithm_of(job: CpGroupJob, call: AttentionCall) -> type[RunningJob]:
    return Gather if call.cp_comm == "all_gather" and job.cp_group.groups > 1 else Ring


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        sinks_H: Tensor | None,
        call: AttentionCall,
        relayout: Relayout,
        jobs: list[CpGroupJob],
    ) -> Tensor:
        tensors = q_THD, k_TGD, v_TGD
        call = call._replace(sinks_H=sinks_H)
        specs = [TensorSpec.of(x, is_query) for x, is_query in zip(tensors, (True, False, False), strict=True)]
        parts = relayout.to_attention(tensors, specs)
        running: list[RunningJob] = []
        for job in jobs:
            q_NHD, k_NGD, v_NGD = parts[job.number]
            running.append(_algorithm_of(job, call)(call, job, relayout.heads[job.number], q_NHD, (k_NGD, v_NGD)))
        in_turn([one.forward() for one in running])
        (out_THD,) = relayout.to_tokens({one.job.number: [one.out_NHD] for one in running}, specs[:1], q_THD)
        saved = [one.saved for one in running]
        ctx.call = call._replace(sinks_H=None)
        ctx.with_sinks = sinks_H is not None
        ctx.relayout = relayout
        ctx.jobs = jobs
        ctx.specs = specs
        ctx.sizes = [len(row) for row in saved]
        # A checkpoint runs a forward again only for what it saved: also on a rank that has no job, the others meet it.
        last = q_THD.new_empty(0) if sinks_H is None else sinks_H
        ctx.save_for_backward(*(tensor for row in saved for tensor in row), last)
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        relayout, jobs = ctx.relayout, ctx.jobs
        ends = list(accumulate(ctx.sizes, initial=0))
        saved = ctx.saved_tensors  # once: under activation checkpointing a second look is an error
        sinks_H = saved[-1] if ctx.with_sinks else None
        call = ctx.call._replace(sinks_H=sinks_H)
        rows = [saved[first:end] for first, end in pairwise(ends)]
        running = [
            _algorithm_of(job, call).restored(call, job, relayout.heads[job.number], row)
            for job, row in zip(jobs, rows, strict=True)
        ]
        douts = relayout.to_attention([dout_THD.contiguous()], ctx.specs[:1])
        in_turn([one.backward(douts[one.job.number][0]) for one in running])
        grads = {one.job.number: one.grads for one in running}
        dq, dk, dv = relayout.to_tokens(grads, ctx.specs, dout_THD)
        return dq, dk, dv, _of_sinks(running, douts, sinks_H), None, None, None


def _of_sinks(running: list[RunningJob], douts: Mapping[int, list[Tensor]], sinks_H: Tensor | None) -> Tensor | None:
    """The gradient of the sinks from what this rank attends for."""
    if sinks_H is None:
        return None
    total_H = torch.zeros_like(sinks_H, dtype=torch.promote_types(sinks_H.dtype, torch.float32))
    for one in running:
        own_H = sinks_H[one.heads.queries]
        total_H[one.heads.queries] += gradient_of_sinks(douts[one.job.number][0], one.out_NHD, one.lse_HN, own_H)
    return total_H.to(sinks_H.dtype)
