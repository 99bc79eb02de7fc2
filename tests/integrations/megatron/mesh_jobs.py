"""What the ranks of unmodified/test_mesh.py do: a user's own training loop whose data ranks share samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import evenload
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.integrations.megatron.unmodified.planning.sharing import meeting
from harness.proof import faults, random_shared_plan
from megatron_tests.float64 import all_in_float64
from megatron_tests.objective_jobs import Fed
from megatron_tests.telling import planted
from megatron_tests.user_jobs import changed_parts, compared, loss_and_tokens, planning, recipe, user_loop, worst

WHOLE = {"pieces": (1,), "replay": "none", "asymmetric": False}
OURS = ("instead", "seed", "cut", "mutant")
_plan = PlanChain.plan


def planned_by(case: dict[str, Any], heads: int) -> Callable[..., StepPlan]:
    """The mesh plugin's plan or that of a baseline of its own, or a random one of any ranks: ``seed`` of whole samples
    without an order, ``cut`` the first from there on that has an order and is in rounds, or can be brought there."""

    def make(chain: PlanChain, lengths: list[int]) -> StepPlan:
        if "seed" not in case and "cut" not in case:
            return _plan(replace(chain, instead=case.get("instead", "")), as_lengths(lengths))
        sizes = {name: getattr(chain.limits, name) for name in ("num_ranks", "num_stages", "layers_per_stage")}
        draw = partial(random_shared_plan, lengths=lengths, heads=heads, **sizes)
        if "seed" in case:
            return check(replace(draw(case["seed"], **WHOLE), order=()))
        return next(plan for plan in map(draw, count(case["cut"])) if plan.shared and plan.cut and _in_rounds(plan))

    return make


def _in_rounds(plan: StepPlan) -> bool:
    asked: list[bool] = []
    meeting(plan, lambda: asked.append(True) or plan)
    return not asked


def shared_steps(
    world: Any, *, cases: list[dict[str, Any]], heads: int = 4, fed: bool = False, **loop: Any
) -> list[dict[str, Any]]:
    """Errors of steps with shared samples against the same loop with nothing switched on.

    Args:
        cases: settings of the mesh plugin, and who plans (`planned_by`), perhaps a ``mutant``.
        fed: reports are compared too, of a loss function without collectives; else it has one.
    """
    results = []
    with user_loop(**loop) as user, all_in_float64():
        user = Fed(user, 3, lone=False) if fed else user
        stock = user.step()
        wanted = loss_and_tokens(stock)
        for case in cases:
            settings = {name: value for name, value in case.items() if name not in OURS}
            with ExitStack() as stack:
                stack.enter_context(evenload.enabled(recipe(mesh={"enabled": True, **settings})))
                made = stack.enter_context(planning(planned_by(case, heads)))
                stack.enter_context(planted(FAULTS, case.get("mutant", "")))
                try:
                    planned = user.step()
                except EvenloadError as error:
                    results.append({"error": str(error)})
                    continue
            shared = [m for m in made[-1].micro_batches if len(m.ranks) > 1]
            results.append(
                {
                    **(compared(planned, stock) if fed else {"grad": worst(planned, stock), "reports": 0.0}),
                    "loss": float(((loss_and_tokens(planned) - wanted).abs() / wanted).max()),
                    "comms": sorted({m.cp_comm for m in shared}),
                    "cut": len(made[-1].cut),
                    "order": bool(made[-1].order),
                }
            )
    return results


def _lost(packed: Any, piece: Any, first: int) -> None:
    if packed.pack.shared:
        packed.fields["loss_mask"][0, first : first + piece.length] = 0.0


FAULTS = {**faults.FAULTS, "a part without loss": changed_parts(_lost)}
