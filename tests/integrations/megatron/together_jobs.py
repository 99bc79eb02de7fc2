"""What ranks do whose micro-batches stay as they are; see unmodified/test_together.py."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import evenload
import torch
from evenload.core.plan.step_plan import StepPlan
from evenload.core.planning.chain import PlanChain
from evenload.integrations.unmodified import planned_runs
from evenload.runtime.experts.balance import Shares
from megatron_tests.user_jobs import compared, listening, recipe, user_loop, worst


def kept_together(world: Any, *, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """A step with plugins against the same step without, for (plugins, loop) of each case."""
    return [_case(plugins, loop) for plugins, loop in cases]


def _case(plugins: dict[str, Any], loop: dict[str, Any]) -> dict[str, Any]:
    plans: list[StepPlan] = []
    make = PlanChain.plan

    def plan(chain: PlanChain, *batch: Any) -> StepPlan:
        plans.append(make(chain, *batch))
        return plans[-1]

    planned_runs._idle.clear()
    with user_loop(**loop) as user:
        stock = user.step()
        with (
            evenload.enabled(recipe(**plugins)),
            listening() as lines,
            patch.object(PlanChain, "plan", plan),
            patch.object(Shares, "fetch", autospec=True, side_effect=Shares.fetch) as fetches,
        ):
            found = user.step()
        again = user.step()
    return {
        **compared(found, stock),
        "again": worst(again, stock),
        "routers": {n: float((v - found["routers"][n]).abs().max()) for n, v in stock["routers"].items()},
        "shapes": sorted(found["shapes"]) == sorted(stock["shapes"]),
        "ordered": any(plan.order for plan in plans),
        "split": sum(map(len, plans[0].split)) if plans else 0,
        "plans": len(plans),
        "copies": fetches.call_count,
        "idle": [line for line in lines if "nothing is planned" in line],
        "finite": all(bool(torch.isfinite(g).all()) for g in found["gradients"].values()),
    }
