"""What the ranks of unmodified/test_mesh.py do: a user's own training loop whose data ranks share samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import evenload
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from megatron_shared_jobs import fault
from megatron_shared_plans import random_shared_plan
from megatron_user_jobs import loss_and_tokens, planning, recipe, user_loop, worst

_plan = PlanChain.plan


def sharing(seed: int, heads: int) -> Callable[..., StepPlan]:
    """A random plan of shared samples for the layout of a chain; that of the plugins where ranks must run in step."""

    def make(chain: PlanChain, lengths: list[int]) -> StepPlan:
        limits = chain.limits
        if limits.in_step > 1:
            return _plan(chain, as_lengths(lengths))
        sizes = {"num_stages": limits.num_stages, "layers_per_stage": limits.layers_per_stage, "heads": heads}
        return random_shared_plan(seed, lengths, num_ranks=limits.num_ranks, **sizes)

    return make


def shared_steps(
    world: Any, *, seeds: list[int | None], mesh: dict[str, Any], mutant: str = "", heads: int = 4, **loop: Any
) -> list[dict[str, Any]]:
    """Errors of steps with shared samples against the same loop with nothing switched on; None: as the plugin plans."""
    results = []
    with user_loop(**loop) as user:
        stock = user.step()
        wanted = loss_and_tokens(stock)
        for seed in seeds:
            with ExitStack() as stack:
                stack.enter_context(evenload.enabled(recipe(mesh={"enabled": True, **mesh})))
                make = (lambda chain, n: _plan(chain, as_lengths(n))) if seed is None else sharing(seed, heads)
                made = stack.enter_context(planning(make))
                stack.enter_context(fault(mutant))
                try:
                    found = user.step()
                except EvenloadError as error:
                    results.append({"seed": seed, "error": str(error)})
                    continue
            results.append(
                {
                    "seed": seed,
                    "grad": worst(found, stock),
                    "loss": float(((loss_and_tokens(found) - wanted).abs() / wanted).max()),
                    "shared": made[-1].shared,
                    "comms": sorted({m.cp_comm for m in made[-1].micro_batches if len(m.ranks) > 1}),
                    "cut": len(made[-1].cut),
                    "order": bool(made[-1].order),
                    "again": len(made) > 1,
                    "reports": len(found["reports"]),
                }
            )
    return results
