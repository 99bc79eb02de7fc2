"""Fields of Megatron-Core's TransformerConfig, and arguments of `user_loop`, that several tests of loops have."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]

MEANS: Fields = {"calculate_per_token_loss": False}
SHARES: Fields = {"tp": 2, "sequence_parallel": True}
EXPERTS: Fields = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
WITHOUT_LOSSES: Fields = {**EXPERTS, "moe_router_load_balancing_type": "none"}
ROUTER_LOSSES: Fields = {
    **EXPERTS,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp64",
    "full": True,
}
