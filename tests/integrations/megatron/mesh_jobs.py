"""What the ranks of unmodified/test_mesh.py do: a user's own training loop whose data ranks share samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import evenload
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from megatron_float64 import all_in_float64
from megatron_objective_jobs import Fed
from megatron_objective_jobs import fault as fault_of_objective
from megatron_shared_jobs import fault
from megatron_shared_plans import random_shared_plan
from megatron_user_jobs import loss_and_tokens, planning, recipe, user_loop, worst

WHOLE = {"pieces": (1,), "replay": "none", "asymmetric": False}
_plan = PlanChain.plan


def planned_by(case: dict[str, Any], heads: int) -> Callable[..., StepPlan]:
    """The mesh plugin's plan, or a random one of whole samples on any ranks where the case has a seed."""

    def make(chain: PlanChain, lengths: list[int]) -> StepPlan:
        limits = chain.limits
        if "seed" not in case:
            return _plan(chain, as_lengths(lengths))
        sizes = {"num_stages": limits.num_stages, "layers_per_stage": limits.layers_per_stage, "heads": heads}
        plan = random_shared_plan(case["seed"], lengths, num_ranks=limits.num_ranks, **sizes, **WHOLE)
        return check(replace(plan, order=()))  # dummies alone bring few orders into rounds

    return make


def shared_steps(
    world: Any, *, cases: list[dict[str, Any]], heads: int = 4, fed: bool = False, **loop: Any
) -> list[dict[str, Any]]:
    """Errors of steps with shared samples against the same loop with nothing switched on.

    Args:
        cases: settings of the mesh plugin, perhaps ``seed`` and ``mutant``.
        fed: reports are compared too, of a loss function without collectives; else it has one.
    """
    results = []
    with user_loop(**loop) as user, all_in_float64():
        user = Fed(user, 3, lone=False) if fed else user
        stock = user.step()
        wanted = loss_and_tokens(stock)
        for case in cases:
            settings = {name: value for name, value in case.items() if name not in ("seed", "mutant")}
            with ExitStack() as stack:
                stack.enter_context(evenload.enabled(recipe(mesh={"enabled": True, **settings})))
                made = stack.enter_context(planning(planned_by(case, heads)))
                mutant = case.get("mutant", "")
                stack.enter_context(fault_of_objective(mutant) if " " in mutant and fed else fault(mutant))
                try:
                    planned = user.step()
                except EvenloadError as error:
                    results.append({"error": str(error)})
                    continue
            shared = [m for m in made[-1].micro_batches if len(m.ranks) > 1]
            pairs = zip(planned["reports"], stock["reports"], strict=True) if fed else ()
            results.append(
                {
                    "grad": worst(planned, stock),
                    "loss": float(((loss_and_tokens(planned) - wanted).abs() / wanted).max()),
                    "reports": max((float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in pairs), default=0.0),
                    "comms": sorted({m.cp_comm for m in shared}),
                    "cut": len(made[-1].cut),
                    "order": bool(made[-1].order),
                }
            )
    return results
