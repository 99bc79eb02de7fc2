"""Experts in Megatron-Core's own MoE layers: fields of its config from ``model.moe``, and a router that knows the pack.

Everything after the router (dispatcher, experts, shared expert) is Megatron's. The router is its `TopKRouter`, whose
parameters, buffers and gating stay, with a `routing` of its own: scores in the precision of the logits, float32 at
least (Megatron's are float32 in a float64 run, too), losses that do not depend on the plan (`runtime.experts.routing`),
and counts for the bias of experts without padding and dummies. What is over an expert's capacity Megatron's function
drops.

Shape legend: T = slots of a pack, E = experts, K = experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from ....core.machine.layout import Layout
from ....core.recipe.sections import Model
from ....runtime.attention.pack import Pack
from ....runtime.experts.routing import WHOLE, Routed, StepRouting, is_token

SEQUENCE_LOSS, BATCH_LOSS = "seq_aux_loss", "aux_loss"


def fields_of_experts(model: Model, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig for the experts of a model; none for a dense one."""
    moe = model.moe
    if moe is None:
        return {}
    losses = {SEQUENCE_LOSS: moe.sequence_aux_loss, BATCH_LOSS: moe.batch_aux_loss}
    on = {name: coefficient for name, coefficient in losses.items() if coefficient}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_layer_freq": [int(layer in model.moe_layers) for layer in range(model.num_layers)],
        "moe_router_topk": moe.topk,
        "moe_router_score_function": moe.score,
        "moe_router_enable_expert_bias": moe.bias_rate > 0,
        "moe_router_bias_update_rate": moe.bias_rate,
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        "moe_router_load_balancing_type": list(on) or "none",
        "moe_aux_loss_coeff": list(on.values()) or 0.0,
        "moe_z_loss_coeff": moe.z_loss or None,
        "moe_expert_capacity_factor": moe.capacity_factor or None,
        "moe_token_dispatcher_type": moe.dispatcher,
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.tp,
    }


class PlannedRouter(TopKRouter):  # type: ignore[misc]
    """Routes the tokens of a pack; the layer that it belongs to tells it which one before each of its forwards, those
    of a recomputation included (`tell_routers`)."""

    pack: Pack
    step: StepRouting

    @property
    def share(self) -> slice:
        """The slots of the pack that this rank's router sees: under sequence parallelism a part, else all."""
        if not self.config.sequence_parallel:
            return WHOLE
        slots = self.pack.num_padded_tokens // self.tp_group.size()
        first = self.tp_group.rank() * slots
        return slice(first, first + slots)

    def own_tokens(self) -> Tensor:
        """bool: which of these slots hold a token."""
        return is_token(self.pack)[self.share]

    def take_pack(self, _: nn.Module, __: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        """A forward pre-hook of the layer."""
        params = arguments["packed_seq_params"]
        self.pack, self.step = params.pack, params.routing

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and, as bool, choices of the experts of each slot [T, E] each."""
        logits_TE = logits.view(-1, self.num_experts)
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        scores_TE = logits_TE.softmax(dim=-1) if self.score_function == "softmax" else logits_TE.sigmoid()
        probs_TK, chosen_TK = self._choose(logits_TE, scores_TE)
        probs_TE = torch.zeros_like(logits_TE).scatter(1, chosen_TK, probs_TK)
        chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
        if self.config.moe_expert_capacity_factor is not None:
            policy = self.config.moe_token_drop_policy
            capacity = self.config.moe_expert_capacity_factor
            probs_TE, chosen_TE = apply_router_token_dropping(probs_TE, chosen_TE, self.topk, capacity, policy)
        if self.step.routes is not None:
            self.step.record(self.pack, self.layer_number - 1, self._of_all_shares(chosen_TK))
        if torch.is_grad_enabled():
            self._count(chosen_TE)
        return self._with_losses(probs_TE, logits_TE, scores_TE), chosen_TE

    def _choose(self, logits_TE: Tensor, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and numbers of the chosen experts [T, K] each."""
        if self.score_function == "softmax":
            largest_TK, chosen_TK = logits_TE.topk(self.topk, dim=-1)
            return largest_TK.softmax(dim=-1), chosen_TK
        biased_TE = scores_TE if self.expert_bias is None else scores_TE + self.expert_bias
        chosen_TK = biased_TE.topk(self.topk, dim=-1).indices
        probs_TK = scores_TE.gather(1, chosen_TK)
        return (probs_TK / (probs_TK.sum(dim=-1, keepdim=True) + 1e-20) if self.topk > 1 else probs_TK), chosen_TK

    def _count(self, chosen_TE: Tensor) -> None:
        """For the bias of experts, in passes with gradients alone: a token that runs again counts once."""
        if self.enable_expert_bias:
            self.local_tokens_per_expert += (chosen_TE & self.own_tokens()[:, None]).sum(dim=0)

    def _of_all_shares(self, choices_TK: Tensor) -> Tensor:
        """Choices for all slots of the pack. Collective over ranks that divide them."""
        if not self.config.sequence_parallel:
            return choices_TK
        whole: Tensor = gather_from_sequence_parallel_region(choices_TK, False, group=self.tp_group)
        return whole

    def _shares(self, scores_TE: Tensor) -> Tensor:
        return scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + 1e-20)

    def _with_losses(self, probs_TE: Tensor, logits_TE: Tensor, scores_TE: Tensor) -> Tensor:
        """The probabilities, from which the backward of the losses starts, too; a generation has none."""
        if self.pack.cached is not None:
            return probs_TE
        if self.config.moe_z_loss_coeff:
            of = {"share": self.share, "layer": self.layer_number}
            probs_TE = self.step.z_loss(probs_TE, logits_TE, self.pack, self.config.moe_z_loss_coeff, **of)
        sequence, batch = self.get_aux_loss_coeff(SEQUENCE_LOSS), self.get_aux_loss_coeff(BATCH_LOSS)
        if not sequence and not batch:
            return probs_TE
        shares_TE = self._shares(scores_TE)
        choices_TK = shares_TE.topk(self.topk, dim=-1).indices
        choices_TK = self._of_all_shares(choices_TK)
        routed = Routed(self.pack, self.layer_number, choices_TK, self.num_experts, self.share)
        if sequence:
            probs_TE = self.step.sequence_loss(probs_TE, shares_TE, routed, sequence)
        if batch:
            probs_TE = self.step.batch_loss(probs_TE, shares_TE, routed, batch)
        return probs_TE


def routers(model: nn.Module) -> list[Any]:
    """Megatron's routers of a GPTModel, layer by layer."""
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def layers_with_experts(gpt: Any) -> list[Any]:
    """Megatron's layers whose ``mlp`` has experts; a hybrid model has layers without any ``mlp``."""
    return [layer for layer in gpt.decoder.layers if isinstance(getattr(layer, "mlp", None), MoELayer)]


def tell_routers(gpt: Any) -> None:
    """Let each layer that has a `PlannedRouter` tell it the pack that it runs."""
    for layer in layers_with_experts(gpt):
        if isinstance(layer.mlp.router, PlannedRouter):
            layer.register_forward_pre_hook(layer.mlp.router.take_pack, with_kwargs=True)


def forget_tokens(gpt: Any) -> None:
    """Let go of what routers and dispatchers keep of the last pass: memory between steps, and graphs whose nodes hold
    the model in a circle that Python's collector cannot see, with the process groups of its layers and their threads.
    """
    for layer in layers_with_experts(gpt):
        dispatcher = layer.mlp.token_dispatcher
        for name, value in list(vars(dispatcher).items()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, None)
        for name in ("pack", "step"):
            vars(layer.mlp.router).pop(name, None)
