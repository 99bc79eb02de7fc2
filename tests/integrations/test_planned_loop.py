"""A loop that nobody edits goes on with one plan on all ranks, or ends on all of them with one message."""

from __future__ import annotations

from dataclasses import replace

import pytest
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.integrations.unmodified.planned_loop import GlobalBatch, LoopSession
from evenload.runtime.world import agreement
from evenload.runtime.world.agreement import rank_and_size

LENGTHS = as_lengths([60, 50, 30, 20, 20, 10, 10, 10])


def loop_of_rank(*caps: int) -> LoopSession:
    load_plugins()
    agreement.before_first = None
    rank, size = rank_and_size()
    recipe = parse({"plugins": {"packing": {"enabled": True, "max_tokens": caps[rank % len(caps)]}}})
    return LoopSession(name="a loop", planners=PlanChain.of_recipe(recipe, recipe.layout(size)))


def steps_of(caps: list[int], before: int) -> str:
    """What this rank reads in the step after ``before`` planned alike."""
    alike, loop = loop_of_rank(*caps[:1]), loop_of_rank(*caps)
    own, loop.chain = loop.chain, alike.chain
    for _ in range(before):
        loop.plan(LENGTHS)
    loop.chain = own
    try:
        plan = loop.plan(LENGTHS)
    except EvenloadError as error:
        return f"{type(error).__name__}: {error.what}"
    return f"step {loop.steps}: {plan.digest.hex()}"


def refused_on(refusing: int) -> str:
    """What this rank reads where the planner of one rank refuses the batch."""
    loop = loop_of_rank(64)

    def planner(chain: PlanChain, batch):
        if rank_and_size()[0] == refusing:
            raise EvenloadError("no plan here", f"rank {refusing}", "change it")
        return chain.plan(batch)

    try:
        loop.plan(LENGTHS, planner)
    except EvenloadError as error:
        return f"{type(error).__name__}: {error.what} ({error.found})"
    return "planned"


DIFFERENT = "the ranks hold different plans"


@pytest.mark.parametrize(
    ("caps", "before", "said"),
    [
        ([64], 2, "step 3: "),
        ([64, 128], 0, f"RankError: step 1: {DIFFERENT}"),
        ([64, 128], 2, f"RankError: step 3: {DIFFERENT}"),
    ],
)
def test_ranks_hold_one_plan_of_the_step_that_it_is_or_end_under_its_number(world, caps, before, said):
    first, second = world(2).run(steps_of, caps, before)
    assert first == second
    assert first.startswith(said)


@pytest.mark.parametrize("refusing", [0, 1])
def test_what_one_rank_refuses_is_raised_on_all(world, refusing):
    assert world(2).run(refused_on, refusing) == [f"EvenloadError: no plan here (rank {refusing})"] * 2


def test_a_warning_is_given_once(caplog):
    loop = loop_of_rank(64)

    def planner(chain: PlanChain, batch):
        plan = chain.plan(batch)
        return plan.revised(notes=("without effect: a setting (of this batch)",))

    for _ in range(2):
        loop.plan(LENGTHS, planner)
    assert sum("a setting" in record.message for record in caplog.records) == 1


def test_a_batch_of_the_lengths_of_the_last_one_is_planned_once(monkeypatch):
    loop, planned = loop_of_rank(64), []
    plan = loop.sync_planning.plan
    monkeypatch.setattr(loop.sync_planning, "plan", lambda *batch: planned.append(batch) or plan(*batch))
    first, again = loop.plan(LENGTHS), loop.plan(LENGTHS.copy())
    assert again is first
    assert loop.steps == 2
    other = loop.plan(LENGTHS[::-1].copy())
    assert other.lengths.tolist() == LENGTHS[::-1].tolist()
    loop.chain = replace(loop.chain)
    assert loop.plan(LENGTHS[::-1].copy()) is not other
    assert len(planned) == 3


@pytest.mark.parametrize(("lengths", "as_good"), [([64] * 8, True), ([64, 8] * 4, False)], ids=["even", "ragged"])
def test_even_samples_stay_where_their_stock_step_is_as_good(lengths, as_good):
    loop = loop_of_rank(64)
    batch = GlobalBatch.of([[[length] for length in lengths]], [[None]] * 8, 0)
    for _ in range(2):
        assert (loop.plan_unless_even(batch) is None) == as_good
        assert loop.has_run == as_good, "the stock step is reported"
