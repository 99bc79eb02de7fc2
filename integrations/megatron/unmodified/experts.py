"""Experts in a Megatron-Core loop that nobody edits: routers that know the packs, for as long as a training call.

A router keeps its weights, its buffers and Megatron's own scores. What depended on the micro-batch does not any more:
padding and dummies count in no loss and in no bias, and the balance loss of a sequence is that of the sequence, not of
the pack (`runtime.experts.routing`). What a loss weighs beside the tokens' losses is what Megatron gives it where
nothing is padded: the z-loss is summed over tokens; a sequence's balance loss counts for each of its tokens once, over
the samples of a micro-batch of the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from ....core.errors import EvenloadError, Rule
from ....core.plan.step_plan import StepPlan
from ....core.registry import layer_planner
from ....runtime.experts.gate import ExpertGate
from ...host import no_mark
from ..model.experts import SEQUENCE_LOSS, PlannedRouter, forget_tokens, routers

_REGROUPED = "depends on which samples are in a micro-batch"


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
        for layer in gpt.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if isinstance(router, TopKRouter):
                undo.callback(setattr, router, "__class__", type(router))
                router.__class__ = LoopRouter
                undo.callback(layer.register_forward_pre_hook(router.take_pack, with_kwargs=True).remove)
        undo.callback(forget_tokens, gpt)
        yield


def gate_of(plan: StepPlan) -> ExpertGate:
    """Of the layers with experts of this rank's stage, for one training call that runs a plan."""
    group = parallel_state.get_expert_model_parallel_group()
    gate = ExpertGate(tuple(dist.get_process_group_ranks(group)), dist.get_rank(group))
    gate.begin(plan.digest, no_mark, plan.experts, layer_planner(plan.experts.planner))
    return gate


def refuse_routers(gpt: Any) -> None:
    """Raise EvenloadError for routers that are not Megatron's own."""
    odd = sorted({type(router).__qualname__ for router in routers(gpt) if type(router) is not TopKRouter})
    if odd:
        do = "use Megatron-Core's TopKRouter, or disable evenload's plugins"
        raise EvenloadError("a router is not known to route packs as it routes samples", ", ".join(odd), do)


def refuse_experts(gpt: Any) -> None:
    """Raise EvenloadError for experts that cannot run beside copies of others."""
    odd = sorted({type(e).__qualname__ for e in _experts_of(gpt) if type(e) is not SequentialMLP})
    fields = ["gradient_accumulation_fusion", "fp8", "fp4", "moe_apply_probs_on_input"]
    fields.append("moe_router_padding_for_quantization")
    odd += [name for name in fields if getattr(gpt.config, name, None)]
    if odd:
        raise EvenloadError(
            "plugins.moe does not know how these experts run, or where their gradients go",
            ", ".join(odd),
            "use SequentialMLP (moe_grouped_gemm=False) without these settings, or set plugins.moe.enabled=false",
        )


def _experts_of(gpt: Any) -> list[Any]:
    return [layer.mlp.experts for layer in gpt.decoder.layers if isinstance(layer.mlp, MoELayer)]


def rules_of_experts(config: Any) -> Iterable[Rule]:
    """What does not compose with regrouped micro-batches."""
    if config.num_moe_experts is None:
        return
    do = "switch it off (moe_router_load_balancing_type seq_aux_loss, the expert bias and the z-loss depend on no "
    do += "plan), or disable evenload's plugins"
    losses = config.moe_router_load_balancing_type
    for name in [losses] if isinstance(losses, str) else losses:
        depends = name not in ("none", SEQUENCE_LOSS) and (_coefficient(config, name) > 0 or name == "sinkhorn")
        yield depends, f"a balance loss {_REGROUPED}", f"moe_router_load_balancing_type {name}", do
    settings = (
        ("moe_expert_capacity_factor", None, f"which tokens an expert drops {_REGROUPED}"),
        ("moe_input_jitter_eps", None, "jitter draws other numbers for packs"),
        ("moe_token_dispatcher_type", "alltoall", "packs differ in length, for which alltoall alone is made"),
        ("tensor_model_parallel_size", 1, "routers of tensor-parallel ranks see parts of a pack"),
    )
    for field, wanted, why in settings:
        value = getattr(config, field)
        yield value != wanted, why, f"{field} {value}, num_moe_experts {config.num_moe_experts}", do


def recipe_of_experts(config: Any) -> dict[str, Any]:
    """``model.family`` and ``model.moe`` of a loop's config: what costs are counted from."""
    frequency, layers = config.moe_layer_freq, config.num_layers
    every = frequency if isinstance(frequency, int) else max(1, round(layers / max(1, sum(frequency))))
    return {
        "family": "qwen3_moe" if config.qk_layernorm else "mixtral",
        "moe": {
            "num_experts": config.num_moe_experts,
            "topk": config.moe_router_topk,
            "ffn_hidden_size": config.moe_ffn_hidden_size or config.ffn_hidden_size,
            "shared_ffn_hidden_size": config.moe_shared_expert_intermediate_size or 0,
            "every": every,
            "score": config.moe_router_score_function,
        },
    }


def _coefficient(config: Any, name: str) -> float:
    losses, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    return float(coefficients if isinstance(losses, str) else coefficients[losses.index(name)])
