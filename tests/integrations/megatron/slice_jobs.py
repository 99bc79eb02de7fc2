"""What the ranks of test_slices.py and test_shared.py do: work that is counted, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from evenload.core.plan.program import lower
from evenload.integrations.megatron.model.attention import PackedCoreAttention
from harness.proof import planned, tokens
from megatron_tests.jobs import hosted, unchanged
from megatron_tests.telling import told


def counted(world: Any, *, plans: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    """How often layers and the head ran in each of some plans, beside the numbers of its passes."""
    calls = {"attention": 0, "head": 0, "graphs": 0}
    attend = PackedCoreAttention.forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls["attention"] += 1
        calls["graphs"] += torch.is_grad_enabled()
        return attend(self, *args, **kwargs)

    def head(*_: Any) -> None:
        calls["head"] += 1

    rows = []
    with hosted(world, **changes) as host, patch.object(PackedCoreAttention, "forward", counting):
        if hasattr(host.model, "output_layer"):
            host.model.output_layer.register_forward_hook(head)
        for drawn in plans:
            calls.update(dict.fromkeys(calls, 0))
            the_plan = planned(host, 1, **drawn)
            result, _ = host.gradients(the_plan, tokens())
            program = lower(the_plan, host.pipeline_stage, host.dp_cp_rank)
            rows.append(
                {
                    **calls,
                    "forwards": len(the_plan.micro_batches),
                    "backwards": len(the_plan.passes("B")),
                    "prefixes": sum(action.kind == "forward_kv" for action in program),
                    "recomputed": [sum(row) for row in the_plan.recompute],
                    "forward_s": result.forward_s,
                }
            )
    return rows


def refused(world: Any) -> list[str]:
    """What is said of plans which no host here can run: without an engine, and for several stages."""
    with hosted(world) as host, unchanged(host):
        good = planned(host, "ring")
        without_engine = replace(good, micro_batches=tuple(m._replace(cp_comm="") for m in good.micro_batches))
        of_stages = replace(good, limits=replace(good.limits, num_stages=2))
        return [told(lambda bad=bad: host.train_step(bad, tokens(), lr=1.0)) for bad in (without_engine, of_stages)]
