"""What a planned step does otherwise than a stock one on purpose, said once, where it changes losses."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from .....runtime.world.agreement import everyone
from ...model.experts import SEQUENCE_LOSS
from ..refusals.expert_rules import losses_of_routers
from ..running.forward_step import UserStep
from .call_plan import CallPlan
from .user_loop import UserLoop

log = logging.getLogger("evenload")


def warn_of_differences(loop: UserLoop, config: Any, planned: CallPlan, step: UserStep, said: set[str]) -> None:
    """Say why the losses of this step are not stock's. Collective in the first step with several samples in a row.

    Args:
        step: which has run.
        said: reasons that have been given; grows.
    """
    if planned.several and loop.mixes_rows is None:
        loop.mixes_rows = any(everyone(step.left_borders_out))
    reasons = []
    if planned.padded and (counting := _counting_padding(config)):
        reasons.append(f"padding of rows counts in Megatron's routers and not here ({', '.join(counting)})")
    if planned.several and loop.mixes_rows:
        reasons.append(
            "samples of one row see each other in Megatron's pipeline stages that forward_step gives no "
            "packed_seq_params, and not here"
        )
    if (new := [reason for reason in reasons if reason not in said]) and dist.get_rank() == 0:
        log.warning("losses and norms differ from stock's, on purpose: %s", "; ".join(new))
    said.update(new)


def _counting_padding(config: Any) -> list[str]:
    """Settings of routers whose effect depends on the padding of rows."""
    if config.num_moe_experts is None:
        return []
    names = ("moe_router_enable_expert_bias", "moe_z_loss_coeff")
    return [name for name in names if getattr(config, name)] + [SEQUENCE_LOSS] * (
        SEQUENCE_LOSS in losses_of_routers(config)
    )
