"""Experts in a Megatron-Core loop that nobody edits: routers that know the packs, for as long as a training call.

A router keeps its weights, its buffers and Megatron's own scores. What depended on the micro-batch does not any more:
padding and dummies count in no loss and in no bias, and the balance loss of a sequence is that of the sequence, not of
the pack (`runtime.experts.routing`). What a loss weighs besides the tokens' losses is what Megatron gives it where
nothing is padded (`weights_of_routers`). Losses for which there is no such weight keep micro-batches as they are
(`together`).

Under sequence parallelism a router sees its rank's share of the pack's slots. The choices of all shares are gathered,
so that every rank knows how often the tokens of a sequence took each expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from .....core.aliases import Floats
from .....core.machine.layout import Layout
from .....core.plan.step_plan import Lengths, StepPlan
from .....core.registry import layer_planner
from .....runtime.experts.gate import ExpertGate
from .....runtime.experts.routing import StepRouting
from .....runtime.experts.weights import REPORTED_SEQUENCE, LoopWeights
from ....host.step import no_mark
from ...base.compat import ROUTERS_COUNT_ALL, report_router_loss
from ...model.experts import PlannedRouter, forget_tokens, layers_with_experts

StockMicroBatches = Sequence[Sequence[int]]
"""For each sequence of a step the lengths of those that came in one micro-batch of the loop, its own among them."""


class LoopRouter(PlannedRouter):
    """A router of the user's model while a plan runs."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and, as bool, choices of the experts of each slot [T, E] each."""
        config, logits_TE = self.config, logits.view(-1, self.num_experts)
        probs_TE, chosen_TE = topk_routing_with_score_function(
            logits_TE,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            fused=config.moe_router_fusion,
        )
        if not self.training:
            return probs_TE, chosen_TE
        if torch.is_grad_enabled():
            self._count(chosen_TE)
        # Also in passes without gradients: a sequence's choices are complete then, before its first backward.
        _, shares_TE = compute_routing_scores_for_aux_loss(
            logits_TE, self.topk, self.score_function, fused=config.moe_router_fusion
        )
        return self._with_losses(probs_TE, logits_TE, shares_TE), chosen_TE

    def _shares(self, scores_TE: Tensor) -> Tensor:
        return scores_TE  # Megatron's function has divided them already


@contextmanager
def routing_packs(gpt: Any) -> Iterator[None]:
    """Inside, the routers of a GPTModel route the packs that its layers are given."""
    with ExitStack() as undo:
        for layer in layers_with_experts(gpt):
            router = layer.mlp.router
            if isinstance(router, TopKRouter):
                undo.callback(setattr, router, "__class__", type(router))
                router.__class__ = LoopRouter
                undo.callback(layer.register_forward_pre_hook(router.take_pack, with_kwargs=True).remove)
        undo.callback(forget_tokens, gpt)
        yield


def gate_of(plan: StepPlan) -> ExpertGate:
    """A gate for the layers with experts of this rank's stage, for one training call that runs a plan."""
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    ranks, parts = tuple(dist.get_process_group_ranks(group)), parallel_state.get_expert_model_parallel_world_size()
    gate = ExpertGate(ranks, dist.get_rank(group), parts=parts)
    gate.begin(plan.digest, no_mark, plan.experts, layer_planner(plan.experts.planner))
    return gate


def with_experts_in_step(layout: Layout, config: Any) -> tuple[Layout, int]:
    """The layout as planners may know it, and how many neighbouring data-parallel ranks run in step.

    Megatron divides experts among neighbouring ranks, tensor-parallel peers first. So a group may lie inside one
    data-parallel rank, and where experts are cut by tensor parallelism, too, it has more ranks than parts of experts.
    """
    if config.num_moe_experts is None:
        return layout, 1
    cut = parallel_state.get_expert_tensor_parallel_world_size()
    in_step = math.lcm(layout.tp, cut * layout.ep) // layout.tp
    return replace(layout, ep=math.gcd(in_step, config.num_moe_experts)), in_step


def routing_of(
    config: Any, lengths: Lengths, stock_micro_batches: StockMicroBatches, num_microbatches: int
) -> StepRouting:
    """What the routers of a loop know of a step.

    Args:
        lengths: of its sequences [S].
        num_microbatches: of the loop, on a rank.
    """
    one = torch.ones(1, device=torch.cuda.current_device())  # Megatron's scales lie there
    scale = 1.0 if config.grad_scale_func is None else float(config.grad_scale_func(one))
    tokens_S, samples_S = (np.array([float(of(one)) for one in stock_micro_batches]) for of in (sum, len))
    weights = weights_of_routers(config, np.asarray(lengths, dtype=np.float64), tokens_S, samples_S, num_microbatches)
    shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
    token_S, sequence_S = (scale * each for each in weights)
    # Megatron reports of a rank's tokens their mean: of a share of the tokens, that is so many times their part.
    return StepRouting(
        lengths, weights=LoopWeights(token_S, sequence_S, shares / tokens_S, 1 / samples_S, partial(_report, config))
    )


def weights_of_routers(
    config: Any, lengths_S: Floats, tokens_S: Floats, samples_S: Floats, num_microbatches: int
) -> tuple[Floats, Floats]:
    """What the z-loss of each token of a sequence, and its balance loss, count in Megatron's gradients, where
    micro-batches have ``tokens_S`` tokens and ``samples_S`` samples and nothing is padded.

    Both are means over a micro-batch. Averaged over micro-batches they stay that, and Megatron then averages over more
    ranks than have data. Where token losses are summed, each mean is multiplied by the tokens of its micro-batch: until
    Megatron-Core 0.19 by those of a rank's share alone, and the balance loss by those of one of its samples.
    """
    cp = parallel_state.get_context_parallel_world_size()
    if not config.calculate_per_token_loss:
        return cp / (num_microbatches * tokens_S), cp / (num_microbatches * samples_S)
    if ROUTERS_COUNT_ALL:
        return np.ones_like(lengths_S), lengths_S
    shares = cp * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    return np.full_like(lengths_S, 1 / shares), lengths_S / (samples_S * shares)


def _report(config: Any, name: str, layer: int, value: Tensor) -> None:
    """To Megatron's tracker, which a loop may print."""
    if name == REPORTED_SEQUENCE:
        groups = {"reduce_group": parallel_state.get_tensor_model_parallel_group()}
    else:
        groups = {"avg_group": parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)}
    report_router_loss(name, value, layer, config.num_layers + (config.mtp_num_layers or 0), **groups)
