"""What the ranks of unmodified/test_context_parallel.py do: a user's own loop with Megatron's context parallelism.

Megatron-Core's own attention knows none, and Transformer Engine's runs on GPUs alone: `ContextAttention` computes what
it computes, whole keys and values from all context-parallel ranks, and is Megatron-Core's for packs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from evenload.runtime.attributes import with_attributes
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron_user_jobs import Loop, user_loop


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks of a group along dimension 0, in zig-zag order."""

    @staticmethod
    def forward(ctx: Any, own: Any, group: Any) -> Any:
        ctx.group, size = group, dist.get_world_size(group)
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own.contiguous(), group=group)
        chunks = [part.chunk(2) for part in parts]
        return torch.cat([*(first for first, _ in chunks), *(second for _, second in reversed(chunks))])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return torch.cat([gradient.chunk(2 * dist.get_world_size(ctx.group))[i] for i in _own(ctx.group)]), None


def _own(group: Any) -> tuple[int, int]:
    """The chunks of this rank."""
    rank = dist.get_rank(group)
    return rank, 2 * dist.get_world_size(group) - 1 - rank


class ContextAttention(DotProductAttention):
    """Causal attention over the context-parallel group that the model was built with."""

    def __init__(self, config: Any, *args: Any, pg_collection: Any = None, **named: Any) -> None:
        with with_attributes(config, context_parallel_size=1):
            super().__init__(config, *args, pg_collection=pg_collection, **named)
        self.cp_group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp

    def forward(self, query: Any, key: Any, value: Any, *rest: Any, packed_seq_params: Any = None, **named: Any) -> Any:
        if packed_seq_params is not None or dist.get_world_size(self.cp_group) == 1:
            return super().forward(query, key, value, *rest, packed_seq_params=packed_seq_params, **named)
        group = self.cp_group
        repeats = query.shape[2] // key.shape[2]
        k, v = (_Gathered.apply(x, group).repeat_interleave(repeats, dim=2) for x in (key, value))
        places = torch.cat([torch.arange(len(k)).chunk(2 * dist.get_world_size(group))[i] for i in _own(group)])
        scores = torch.einsum("qbhd,kbhd->bhqk", query, k) * self.softmax_scale
        scores = scores.masked_fill(torch.arange(len(k))[None, :] > places[:, None], float("-inf"))
        return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(dim=-1), v).flatten(2)


def context_spec() -> Any:
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = ContextAttention
    return spec


class CutByRank(Loop):
    """The loop of a script that takes its context-parallel rank's part of each batch, as Megatron-LM's do."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop.script, loop.model)

    def forward_step(self, data_iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        batch = get_batch_on_this_cp_rank(dict(next(data_iterator)))
        return super().forward_step(iter([batch]), model)


def stock(world: Any, **loop: Any) -> Any:
    with user_loop(spec=context_spec, **loop) as alike:
        return CutByRank(alike).step()
