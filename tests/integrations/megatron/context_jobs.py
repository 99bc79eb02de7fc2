"""What the ranks of unmodified/test_context_parallel.py do: a user's own loop with Megatron's context parallelism.

Megatron-Core's own attention knows none, and Transformer Engine's runs on GPUs alone: `ContextAttention` computes what
it computes, whole keys and values from all context-parallel ranks, and is Megatron-Core's for packs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import Any
from unittest.mock import patch

import evenload
import torch
import torch.distributed as dist
from evenload.integrations.megatron.unmodified.reading import batches
from evenload.integrations.megatron.unmodified.reading.context_parallel import CpShards
from evenload.runtime.attributes import with_attributes
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron_tests.float64 import all_in_float64
from megatron_tests.mesh_jobs import planned_by
from megatron_tests.objective_jobs import PACKED, Fed
from megatron_tests.telling import planted, told
from megatron_tests.user_jobs import Loop, compared, planning, recipe, user_loop


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


def context_spec(experts: int | None = None) -> Any:
    spec = get_gpt_layer_local_spec(experts, moe_grouped_gemm=False)
    spec.submodules.self_attention.submodules.core_attention = ContextAttention
    return spec


ONE_CUT = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters else {}
"""What scripts of newer versions say besides: every batch is cut over the same ranks."""


class CutByRank(Fed):
    """The loop of a script that takes its context-parallel rank's part of each batch, as Megatron-LM's do."""

    def __init__(self, loop: Loop, values: int = 3) -> None:
        super().__init__(loop, values, lone=False)

    def forward_step(self, data_iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        group = parallel_state.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(dict(next(data_iterator)), cp_group=group, **ONE_CUT)
        return super().forward_step(iter([batch]), model)


def in_context(
    world: Any, *, plugins: list[dict[str, Any]], seeds: tuple[int, ...] = (), mutant: str = "", **loop: Any
) -> list[dict[str, Any]]:
    """Errors of planned steps against the loop with Megatron's context parallelism, and that loop again."""
    results = []
    spec = partial(context_spec, loop.get("num_moe_experts"))
    with user_loop(spec=spec, **loop) as alike, all_in_float64():
        user = CutByRank(alike)
        stock = user.step()
        plans = [(one, nullcontext([])) for one in plugins]
        plans += [(MESH, planning(planned_by({"seed": seed}, 4))) for seed in seeds]
        for one, plan in plans:
            with evenload.enabled(recipe(**one)), plan as made, planted(FAULTS, mutant):
                planned = user.step()
            shared = any(plan.shared for plan in made)
            results.append({**compared(planned, stock), "shared": shared})
        results.append(compared(user.step(), stock))
    return results


MESH = {"mesh": {"enabled": True, "max_tokens": 64}}


def left_in_context(world: Any, **loop: Any) -> dict[str, Any]:
    """What a loop sees inside a planned step, what is left of it behind one that raised, and what it is told."""
    with user_loop(spec=context_spec, **loop) as alike:
        user, seen, said = CutByRank(alike), [], {}
        module = alike.model.module
        layer = module.decoder.layers[0].self_attention

        def state() -> tuple[Any, ...]:
            rope = getattr(module.rotary_pos_emb, "base", module.rotary_pos_emb)
            groups = (layer.pg_collection.cp, layer.core_attention.cp_group, rope.cp_group, module.cp_group)
            config = module.config.context_parallel_size
            return (*map(dist.get_world_size, groups), config, parallel_state.get_context_parallel_world_size())

        def step(data_iterator: Any, model: Any) -> Any:
            seen.append(state())
            raise KeyError("a fault of the script")

        before = state(), [id(one) for one in (layer.pg_collection.cp, module.cp_group)]
        with evenload.enabled(recipe(**PACKED)):
            try:
                user.step(step)
            except KeyError:
                said["raised"] = True
        after = state(), [id(one) for one in (layer.pg_collection.cp, module.cp_group)]
        for name, values in (("multi_latent_attention", True), ("mtp_num_layers", 1)):
            with with_attributes(module.config, **{name: values}):
                said[name] = told(user.step, evenload.enabled(recipe(**PACKED)))
        user.values = 2
        with with_attributes(module.config, calculate_per_token_loss=False):
            said["two values"] = told(user.step, evenload.enabled(recipe(**PACKED)))
        return {"seen": seen, "same": before == after, "before": before[0], "told": said}


def _in_a_row(cp_shards: Any, piece: Any) -> Any:
    """As if the first rank had the first half of each row."""
    half = cp_shards.rows[piece.sequence] // 2
    parts = [piece._replace(stop=min(piece.stop, half)), piece._replace(start=max(piece.start, half))]
    return [(cp_shards.number(piece.sequence, i), part) for i, part in enumerate(parts) if part.start < part.stop]


FAULTS = {
    "one mean for all context ranks": lambda: patch.object(
        batches, "targets_of_columns", lambda mask, ranks: [float(mask.sum())] * ranks
    ),
    "halves in a row": lambda: patch.object(CpShards, "of", _in_a_row),
}
