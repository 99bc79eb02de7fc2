"""What a plan gains over the trainer's own step, and when that is nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from evenload.api import load_plugins
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.gains import gains, stock_as_good
from evenload.core.recipe.recipe import parse


def chain_of(max_tokens: int, size: int) -> PlanChain:
    load_plugins()
    recipe = parse({"parallel": {"dp": 2}, "plugins": {"packing": {"enabled": True, "max_tokens": max_tokens}}})
    return replace(PlanChain.of_recipe(recipe, recipe.layout(2)), micro_batch_size=size)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "size", "as_good"),
    [
        ([512] * 8, 512, 1, True),
        ([512] * 8, 2048, 4, True),
        ([512, 64] * 4, 1024, 1, False),
    ],
    ids=["a sample a pack", "as many a pack", "ragged"],
)
def test_the_stock_step_is_as_good_where_nothing_is_padded_and_nobody_waits(lengths, max_tokens, size, as_good):
    chain = chain_of(max_tokens, size)
    plan = chain.plan(as_lengths(lengths))
    stock = stock_as_good(chain, plan)
    assert (stock is not None) == as_good
    assert stock is None or stock.digest == chain.stock(plan.lengths).digest
    assert (gains(chain, plan)["gain"] <= 1.02) == as_good
