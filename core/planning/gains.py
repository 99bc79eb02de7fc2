"""What a plan of one batch is predicted to gain over the trainer's own, plugin by plugin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import EvenloadError
from ..plan.step_plan import StepPlan
from .chain import PlanChain
from .judge import judge
from .notes import LEFT_OUT

NOTHING = 0.02
"""Share of a step below which a plan's gain is not worth its exchange of samples, its packs and its planning."""


def stock_as_good(chain: PlanChain, plan: StepPlan) -> StepPlan | None:
    """The trainer's own step of the batch where it is predicted to take as long as the plan's, but for `NOTHING`."""
    stock = chain.stock(plan.lengths)
    stock_s, plan_s = beside_stock(chain, plan, stock)
    return stock if stock_s <= (1 + NOTHING) * plan_s else None


def own_step(
    chain: PlanChain, plan: StepPlan, micro_batch_size: int | None = None, packed: StepPlan | None = None
) -> StepPlan:
    """The step of a plan's batch as the loop itself runs it; `gains` has the arguments."""
    return packed or replace(chain, micro_batch_size=micro_batch_size or chain.micro_batch_size).stock(plan.lengths)


def beside_stock(chain: PlanChain, plan: StepPlan, stock: StepPlan) -> tuple[float, float]:
    """The predicted seconds of both."""
    stock_s, plan_s = (judge(one, chain.context).step_s for one in (stock, plan))
    return stock_s, plan_s


def gains(
    chain: PlanChain, plan: StepPlan, micro_batch_size: int | None = None, packed: StepPlan | None = None
) -> dict[str, Any]:
    """A plan next to the stock plan of its batch, as JSON; all seconds are predicted by the simulator.

    A plugin's ``gain`` is the step that the plugins before it plan, over the step with it too; null where it or the
    chain up to it plans nothing, and ``refused`` then says why.

    Args:
        chain: what made the plan.
        micro_batch_size: samples of a stock micro-batch, padded to its longest; None: the chain's.
        packed: the loop's own step, where its rows hold several samples and are not padded; None: it is as above.
    """
    stock = own_step(chain, plan, micro_batch_size, packed)
    stock_s, plan_s = beside_stock(chain, plan, stock)
    return {
        "predicted": True,
        "made_by": plan.made_by,
        "ranks": plan.limits.num_ranks,
        "samples": len(plan.lengths),
        "lengths": plan.lengths.tolist(),
        "tokens": plan.num_tokens,
        "packed": packed is not None,
        "padded_tokens": plan.num_padded_tokens - plan.num_tokens,
        "stock_padded_tokens": stock.num_padded_tokens - stock.num_tokens,
        "step_s": plan_s,
        "stock_step_s": stock_s,
        "gain": stock_s / plan_s,
        "plugins": _of_plugins(chain, plan, stock_s),
        "notes": list(plan.notes),
    }


def _of_plugins(chain: PlanChain, plan: StepPlan, stock_s: float) -> list[dict[str, Any]]:
    rows = []
    before_s = stock_s
    for place, (plugin, _) in enumerate(chain.links):
        refused = refused_by(plan, plugin.name)
        step_s = None
        if not refused:
            try:
                last = place == len(chain.links) - 1
                upto = plan if last else replace(chain, links=chain.links[: place + 1]).plan(plan.lengths)
                step_s = judge(upto, chain.context).step_s
            except EvenloadError as error:
                refused = f"{error.what} ({error.found})"
        rows.append({"name": plugin.name, "refused": refused or None, "gain": step_s and before_s / step_s})
        before_s = step_s or before_s
    return rows


def refused_by(plan: StepPlan, plugin: str) -> str:
    """Why a plugin could not plan the batch, which another one could; empty where it did."""
    head = f"{LEFT_OUT}{plugin}: "
    return next((note.removeprefix(head) for note in plan.notes if note.startswith(head)), "")
