"""Plain training of a host's weights, for the proof that a plan changed nothing.

Nothing of the planned path is used: Megatron-Core's *stock* local layers and rotary embeddings, a model with all layers
on each rank, whole sequences one after the other in their own [1, L] batch, no pack, no plan, no DDP. Tensor
parallelism is kept as the host has it (a gradient shard is then compared with the same shard, and Megatron's
cross-entropy, float32 inside even in a float64 run, rounds alike on both sides: parity to 1e-15 is left visible).

Two liberties, neither of which the planned path shares. Sequences are dealt to all ranks of equal tensor-parallel
index and their float64 gradient sums are added up at the end. Beyond `STOCK_ATTENTION` tokens the stock core attention,
which keeps [heads, L, L] scores, is replaced by torch's scaled_dot_product_attention on the same whole sequence.
The reference of a bf16 run is computed in float32 from the bf16 weights: what bf16 would give without its rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...core.layout import Layout
from ...core.recipe import Recipe
from ...core.workload import Sequence
from ...runtime.pack import TokensOf
from .model import build_model, transformer_config
from .weights import global_parameters

if TYPE_CHECKING:
    from .host import MegatronHost

STOCK_ATTENTION = 2048
"""Longest sequence [tokens] that goes through Megatron's own DotProductAttention."""


def reference(
    recipe: Recipe, host: MegatronHost, tokens_of: TokensOf, sequences: Iterable[Sequence]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole model by global parameter name, float64 on the CPU. Collective.

    The loss is the sum of all token losses / target tokens, as `StepResult.loss`; tensor-parallel shards are those of
    this rank, so every gradient that `MegatronHost.gradients` returns here has its counterpart.
    """
    alone, workers = _own_groups(host)
    model = _plain_model(recipe, host, alone)
    batch = list(sequences)
    mine = batch[dist.get_rank(workers) :: dist.get_world_size(workers)]
    parameters = dict(global_parameters(model))
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    totals = torch.zeros(2, dtype=torch.float64, device=host.ddp.buffers[0].grad_data.device)
    for sequence in mine:
        if sequence.length < 2:
            continue
        loss_sum = _whole_sequence(
            model, torch.from_numpy(tokens_of(sequence.index)[: sequence.length]).to(totals.device)
        )
        totals += torch.stack([loss_sum, totals.new_tensor(sequence.length - 1)])
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                sums[name] += parameter.grad
                parameter.grad = None
    dist.all_reduce(totals, group=workers)
    for name, total in sums.items():
        dist.all_reduce(total, group=workers)
        if "q_layernorm" in name or "k_layernorm" in name:
            # Each tensor-parallel rank has its own heads' part, which Megatron sums when it finalizes.
            dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        total /= totals[1]
    dist.destroy_process_group(workers)
    dist.destroy_process_group(alone)
    return float(totals[0] / totals[1]), {name: total.cpu() for name, total in sums.items()}


def grad_rel_err(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """max over parameters of ||g - ref|| / ||ref||, for the parameters that this rank holds.

    A parameter whose reference is zero counts by ||g|| itself. NaN counts as infinite.
    """
    worst = 0.0
    for name, gradient in gradients.items():
        wanted = expected[name].double()
        error = float((gradient.double() - wanted).norm()) / (float(wanted.norm()) or 1.0)
        worst = max(worst, error if error == error else float("inf"))
    return worst


def _plain_model(recipe: Recipe, host: MegatronHost, alone: dist.ProcessGroup) -> Any:
    """The stock model with the host's weights, all layers on each rank."""
    plain = {"train.recompute": False, **({"train.dtype": "fp32"} if recipe.train.dtype == "bf16" else {})}
    recipe = recipe.changed(plain)
    groups = ProcessGroupCollection(
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        pp=alone,
        embd=None,
        pos_embd=None,
    )
    config = transformer_config(recipe, Layout(tp=host.layout.tp), attention_softmax_in_fp32=False)
    model = build_model(recipe, config, first=True, last=True, packed=False, pg_collection=groups)
    model.to(next(host.model.parameters()).device)
    for layer in model.decoder.layers:
        attention = layer.self_attention
        attention.core_attention = _ByLength(attention.core_attention, config)
    weights = _whole_model_weights(host)
    with torch.no_grad():
        for name, parameter in global_parameters(model):
            parameter.copy_(weights[name])
    return model


def _own_groups(host: MegatronHost) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """A group of this rank alone, and one of all ranks of its tensor-parallel index. Made by all ranks in one order."""
    rows: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(rows, host.tp_rank)
    alone = [dist.new_group([rank]) for rank in range(len(rows))]
    workers = [dist.new_group([rank for rank, tp in enumerate(rows) if tp == index]) for index in range(host.layout.tp)]
    return alone[dist.get_rank()], workers[host.tp_rank]


def _whole_model_weights(host: MegatronHost) -> dict[str, Tensor]:
    own = {name: p.detach().cpu() for name, p in global_parameters(host.model)}
    stages: list[dict[str, Tensor]] = [{} for _ in range(host.layout.pp)]
    dist.all_gather_object(stages, own, group=parallel_state.get_pipeline_model_parallel_group())
    return {name: weight for stage in stages for name, weight in stage.items()}


def _whole_sequence(model: Any, tokens_L: Tensor) -> Tensor:
    """Sum of the token losses of one sequence, after its backward. The last token has no target."""
    length = len(tokens_L)
    mask_LL = None
    if length <= STOCK_ATTENTION:
        mask_LL = torch.ones(length, length, dtype=torch.bool, device=tokens_L.device).triu(1)[None, None]
    positions = torch.arange(length, device=tokens_L.device)[None]
    losses_1L: Tensor = model(tokens_L[None], positions, mask_LL, labels=tokens_L.roll(-1)[None])
    loss = losses_1L[0, :-1].double().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


class _ByLength(MegatronModule):  # type: ignore[misc]
    """Stock core attention for short sequences, torch's for long ones."""

    def __init__(self, stock: Callable[..., Tensor], config: Any) -> None:
        super().__init__(config=config)
        self.stock = stock

    def forward(self, q_LBHD: Tensor, k_LBGD: Tensor, v_LBGD: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        if mask is not None:
            return self.stock(q_LBHD, k_LBGD, v_LBGD, mask, **kwargs)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_LBHD, k_LBGD, v_LBGD))
        out_BHLD = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out_BHLD.permute(2, 0, 1, 3).flatten(2)
