"""What packing chooses from: lawful plans, and chunks once the work for slices of equal cost is used up."""

import pytest
from evenload.core.balance.bound import lower_bound_s
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.laws import check
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.plugins.packing import candidates
from evenload.plugins.packing.candidates import portfolio
from evenload.plugins.packing.config import PackingConfig

COSTS = Costs(
    forward=PassCost(launch_s=1e-4, token_s=1e-6, pair_s=1e-10),
    backward=PassCost(launch_s=1e-4, token_s=2e-6, pair_s=2.5e-10),
    memory=MemoryCost(activation_bytes_per_token=1.0),
    source="by hand",
)


def plans(lengths, **section):
    limits, config = Limits(2, 500), PackingConfig.model_validate({"max_tokens": 500, **section})
    batch = as_lengths(lengths)
    bound_s = lower_bound_s(batch, limits, COSTS)
    return list(portfolio(StepPlan(batch, (), limits), limits, COSTS, config, bound_s))


@pytest.mark.parametrize("lengths", [[300, 200, 100, 40], [3000, 200, 100, 40], [2]])
@pytest.mark.parametrize("slices", ["auto", "even"])
def test_every_candidate_is_lawful(lengths, slices):
    drafts = plans(lengths, slices=slices)
    assert drafts
    for draft in drafts:
        check(draft)
    assert any(not draft.cut for draft in drafts) == (max(lengths) <= 500)


def test_chunks_run_where_the_work_for_equal_slices_is_used_up(monkeypatch):
    monkeypatch.setattr(candidates, "_LEAST_WORK", 1)
    monkeypatch.setattr(candidates, "_WORK", 0)
    even, *_ = plans([5000, 4000])
    check(even)
    assert {s.length for m in even.micro_batches for s in m.slices} == {500}
