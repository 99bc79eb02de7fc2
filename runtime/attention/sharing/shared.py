"""Attention of a micro-batch that several ranks share: one autograd node for each layer and pack.

Shape legend: T = slots of the pack, N = tokens that a job attends for here, H = query heads, G = key/value heads,
D = head dimension.

The node takes the pack's queries, keys and values to the ranks that attend for them (`relayout`), runs the jobs of the
micro-batch in turn (`work`), and brings the output back; its backward does the same with gradients. It keeps q, out and
the log-sum-exp of each query, and K and V of uncut slices, all of this rank. What a replay needs travels with the pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....core.plan.step_plan import MicroBatch, Slice
from ....core.plan.token_layout import Pieces, cp_group_of, dealt, layout_of
from ...world.plane import Plane
from ..blocks import choose_block
from .gather import Gather
from .jobs import Job, jobs_of
from .relayout import Kind, Relayout, relayout_of
from .ring import Ring
from .work import Call, Work, in_turn

if TYPE_CHECKING:
    from ..pack import Pack


@dataclass(frozen=True, eq=False)
class Shared:
    """What a pack of a shared micro-batch carries."""

    plane: Plane
    micro_batch: MicroBatch
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def layout(self) -> Mapping[int, Pieces]:
        """The token layout: the pieces of every rank of the micro-batch."""
        return layout_of(self.micro_batch, self.plane.node_ranks)

    def pieces_of(self, rank: int) -> Pieces:
        """Those of one rank; the others' are not worked out unless tokens are evened."""
        if self.micro_batch.remap:
            return self.layout[rank]
        pieces: list[Slice] = []
        for number, piece in enumerate(self.micro_batch.slices):
            cp_group = cp_group_of(self.micro_batch, number)
            pieces += dealt(piece, cp_group, cp_group.ranks.index(rank)) if rank in cp_group.ranks else ()
        return tuple(pieces)

    def jobs(self, pack: Pack) -> tuple[Job, ...]:
        """All jobs of the micro-batch, those of other ranks too."""
        if "jobs" not in self._known:
            store = pack.prefix
            self._known["jobs"] = jobs_of(
                self.micro_batch,
                self.plane.node_ranks,
                lambda piece: store is not None and piece.sequence in store,
                lambda piece, rank: store.before(piece, rank) if store else 0,
            )
        return self._known["jobs"]  # type: ignore[no-any-return]

    def relayout(self, pack: Pack, num_heads: tuple[int, int], device: torch.device) -> Relayout:
        """Between the token layout and the attention layout."""
        key = num_heads, device
        if key not in self._known:
            starts = pack.segments[: len(pack.slices)]
            holders = self.micro_batch.ranks if self.micro_batch.remap else ()
            self._known[key] = relayout_of(
                self.plane, self.pieces_of, holders, starts, pack.num_padded_tokens, self.jobs(pack), *key
            )
        return self._known[key]  # type: ignore[no-any-return]


def shared_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pack: Pack, layer: int, scale: float) -> Tensor:
    """`packed_attention` of a pack whose micro-batch is shared; every rank of it calls this, layer by layer."""
    shared = pack.shared
    assert shared is not None
    frozen = torch.is_grad_enabled() and not any(x.requires_grad for x in (q_THD, k_TGD, v_TGD))
    block = choose_block(q_THD.device, q_THD.dtype, q_THD.shape[-1])
    heads = q_THD.shape[1], k_TGD.shape[1]
    cp_comm, routed = shared.micro_batch.cp_comm, shared.micro_batch.routed
    call = Call(shared.plane, pack.prefix, layer, scale, block, frozen, heads, cp_comm, routed)
    relayout = shared.relayout(pack, heads, q_THD.device)
    jobs = [job for job in shared.jobs(pack) if job.number in relayout.counts]
    out: Tensor = _SharedAttention.apply(q_THD, k_TGD, v_TGD, call, relayout, jobs)  # type: ignore[no-untyped-call]
    return out


def _engine_of(job: Job, call: Call) -> type[Work]:
    return Gather if call.cp_comm == "all_gather" and job.cp_group.groups > 1 else Ring


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, call: Call, relayout: Relayout, jobs: list[Job]
    ) -> Tensor:
        tensors = q_THD, k_TGD, v_TGD
        kinds = [Kind.of(x, is_query) for x, is_query in zip(tensors, (True, False, False), strict=True)]
        parts = relayout.to_attention(tensors, kinds)
        works: list[Work] = []
        for job in jobs:
            q_NHD, k_NGD, v_NGD = parts[job.number]
            works.append(_engine_of(job, call)(call, job, relayout.heads[job.number], q_NHD, (k_NGD, v_NGD)))
        in_turn([work.forward() for work in works])
        (out_THD,) = relayout.to_tokens({w.job.number: [w.out_NHD] for w in works}, kinds[:1], q_THD)
        saved = [work.saved for work in works]
        ctx.call, ctx.relayout, ctx.jobs, ctx.kinds = call, relayout, jobs, kinds
        ctx.sizes = [len(row) for row in saved]
        ctx.save_for_backward(*(tensor for row in saved for tensor in row))
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        call, relayout, jobs = ctx.call, ctx.relayout, ctx.jobs
        ends = list(accumulate(ctx.sizes, initial=0))
        saved = ctx.saved_tensors  # once: under activation checkpointing a second look is an error
        rows = [saved[first:end] for first, end in pairwise(ends)]
        works = [
            _engine_of(job, call).restored(call, job, relayout.heads[job.number], row)
            for job, row in zip(jobs, rows, strict=True)
        ]
        douts = relayout.to_attention([dout_THD.contiguous()], ctx.kinds[:1])
        in_turn([work.backward(douts[work.job.number][0]) for work in works])
        grads = {work.job.number: work.grads for work in works}
        dq, dk, dv = relayout.to_tokens(grads, ctx.kinds, dout_THD)
        return dq, dk, dv, None, None, None
