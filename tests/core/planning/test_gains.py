"""What a plan gains over the trainer's own step, and when that is nothing."""

from dataclasses import replace

import pytest
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.gains import gains, stock_as_good

from ..by_hand import chain_of


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "size", "as_good"),
    [([512] * 8, 512, 1, True), ([512] * 8, 2048, 4, True), ([512, 64] * 4, 1024, 1, False)],
    ids=["a sample a pack", "as many a pack", "ragged"],
)
def test_the_stock_step_is_as_good_where_nothing_is_padded_and_nobody_waits(lengths, max_tokens, size, as_good):
    chain = replace(chain_of({"packing": {"max_tokens": max_tokens}}, parallel={"dp": 2}), micro_batch_size=size)
    plan = chain.plan(as_lengths(lengths))
    stock = stock_as_good(chain, plan)
    assert (stock is not None) == as_good
    assert stock is None or stock.digest == chain.stock(plan.lengths).digest
    assert (gains(chain, plan)["gain"] <= 1.02) == as_good
