"""The planner: one agreed plan a step, and what happens when a planner is late, fails or breaks a law."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from evenload.core.errors import EvenloadError, RankError
from evenload.core.laws import check
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning import planner as planner_module
from evenload.core.planning.judge import outcome_of
from evenload.core.planning.planner import Draw, Planner
from evenload.core.registry import Baseline, Baselines, get

from ..by_hand import chain_of
from .ranks import Exchange, fails, late, on_ranks, otherwise, packed, unlawful

LENGTHS = np.array([50, 40, 30, 30, 20, 10, 10, 5])


def chain(plan=None):
    """The packing chain on 2 ranks, its planner replaced if one is given."""
    made = chain_of({"packing": {"max_tokens": 64, "slices": "off"}}, parallel={"dp": 2})
    return made if plan is None else replace(made, links=((replace(get("packing"), plan=plan), made.links[0][1]),))


def with_baseline(made, baseline):
    """The chain with other chunks, which are what takes over first."""
    ((plugin, config),) = made.links
    own = replace(plugin.baselines, rows={"chunks": Baseline(baseline)})
    return replace(made, links=((replace(plugin, baselines=own), config),))


class Draws:
    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return Draw(np.arange(8), LENGTHS, {"consumed": 8 * self.count})


@pytest.mark.parametrize("background", [True, False])
def test_plans_are_made_ahead_and_keep_their_own_state(background):
    draws = Draws()
    planner = Planner(chain(), draws, background=background, budget_s=60)
    first, second = planner.next(), planner.next()
    assert first.plan.made_by == "packing"
    assert (first.draw.state, second.draw.state) == ({"consumed": 8}, {"consumed": 16})
    assert draws.count == (3 if background else 2), (
        "the state of a prefetched batch must not leak into the one that runs"
    )
    assert first.plan.digest == second.plan.digest


class OfTenants(Draws):
    tenants = np.array([2, 1, 2, 1, 2, 1, 2, 1])

    def __call__(self):
        return super().__call__()._replace(tenants=self.tenants)


@pytest.mark.parametrize("background", [True, False])
def test_tenants_of_a_draw_are_those_of_its_plan(background):
    planned = Planner(chain(), OfTenants(), background=background, budget_s=60).next()
    assert planned.plan.tenants.tolist() == OfTenants.tenants.tolist()
    assert planned.plan.digest != Planner(chain(), Draws(), background=background, budget_s=60).next().plan.digest


def test_a_plan_that_takes_over_has_the_tenants():
    planned = Planner(chain(fails), OfTenants(), budget_s=60).next()
    assert planned.plan.made_by == "chunks"
    assert planned.plan.tenants.tolist() == OfTenants.tenants.tolist()


@pytest.mark.parametrize(("plan", "word"), [(late, "late"), (fails, "failed"), (unlawful, "failed")])
def test_a_bad_planner_hands_over_loudly(plan, word, caplog):
    planner = Planner(chain(plan), Draws(), budget_s=0.05)
    with caplog.at_level(logging.WARNING, "evenload"):
        planned = planner.next()
    assert planned.plan.made_by == "chunks"
    assert check(planned.plan)
    assert word in planned.plan.notes[-1]
    assert "'chunks' runs" in caplog.text


@pytest.mark.parametrize(("baseline", "words"), [(unlawful, ""), (fails, ": inside a planner")])
def test_the_stock_plan_is_the_last_resort(baseline, words, caplog):
    with caplog.at_level(logging.WARNING, "evenload"):
        planned = Planner(with_baseline(chain(fails), baseline), Draws(), budget_s=60).next()
    assert planned.plan.made_by == "stock"
    assert f"'chunks' failed too{words}" in caplog.text


def only_stock(plan):
    """A chain that nothing but stock could take over from, and stock's two samples at once are over its cap."""
    ((plugin, config),) = chain(plan).links
    return replace(chain(plan), links=((replace(plugin, baselines=Baselines()), config),), micro_batch_size=2)


def test_stock_that_breaks_a_cap_does_not_take_over(caplog):
    with (
        caplog.at_level(logging.WARNING, "evenload"),
        pytest.raises(EvenloadError, match="no planner could plan this step under the caps") as caught,
    ):
        Planner(only_stock(fails), Draws(), budget_s=60).next()
    assert "ZeroDivisionError: inside a planner" in caught.value.found
    assert "100 tokens on a rank, cap 64" in caplog.text


def test_a_late_plan_is_waited_for_where_nothing_else_keeps_the_caps(caplog):
    goes_on = threading.Event()

    def slow(*step):
        assert goes_on.wait(30)
        return packed(*step)

    class Told(logging.Handler):
        def emit(self, record):
            if "the step waits" in record.getMessage():
                goes_on.set()

    logging.getLogger("evenload").addHandler(handler := Told())
    try:
        planned = Planner(only_stock(slow), Draws(), budget_s=0.01).next()
    finally:
        logging.getLogger("evenload").removeHandler(handler)
    assert planned.plan.made_by == "packing"
    assert planned.plan.notes[-1] == "waited for: late on ranks [0]"


def test_what_plans_leave_out_is_warned_of_once(caplog):
    both = {"packing": {"max_tokens": 40, "slices": "off"}, "mesh": {"max_tokens": 48}}
    planner = Planner(chain_of(both, parallel={"dp": 2}), Draws(), budget_s=60)
    with caplog.at_level(logging.WARNING, "evenload"):
        for _ in range(3):
            planner.next()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("left out of this plan: packing: a sequence is longer than plugins.packing.max_t")
    assert said[1] == "the least max_tokens of all plugins holds: packing 40, mesh 48"


def short(*step):
    return replace(packed(*step), made_by="other")


@pytest.mark.parametrize("background", [True, False])
def test_another_chain_takes_over_with_the_next_plan_that_is_begun(background):
    old, new = chain(), chain(short)
    planner = Planner(old, Draws(), background=background, budget_s=60)
    assert planner.chain_of_next is old
    planner.next()
    planner.chain = new
    assert planner.chain_of_next is (old if background else new)
    made = [planner.next() for _ in range(2)]
    assert [p.plan.made_by for p in made] == (["packing", "other"] if background else ["other", "other"])
    assert [p.chain is new for p in made] == [not background, True]
    resumed = Planner(new, Draws(), background=background, first=old, budget_s=60)
    assert [resumed.next().chain for _ in range(3)] == [old, new, new]


def test_a_fallback_uses_what_its_plan_was_begun_with():
    planner = Planner(with_baseline(chain(fails), short), Draws(), budget_s=60)
    planner.next()
    planner.chain = chain()
    assert planner.next().plan.made_by == "other"
    assert planner.next().plan.made_by == "packing"


def test_a_fallback_goes_on_with_the_policy_of_experts_of_the_step_before():
    plugins = {"packing": {"max_tokens": 64, "slices": "off"}, "moe": {"mode": "clone", "slots": 1}}
    experts = {"family": "mixtral", "moe": {"num_experts": 4}}
    whole = chain_of(plugins, model=experts, parallel={"dp": 2, "ep": 2})
    ((packing, config), *others) = whole.links
    turns = iter((packing.plan, fails))
    link = replace(packing, plan=lambda *step: next(turns)(*step)), config
    planner = Planner(replace(whole, links=(link, *others)), Draws(), background=False)
    first, second = planner.next().plan, planner.next().plan
    assert (first.made_by, second.made_by) == ("packing", "chunks")
    assert first.experts.planner == "clone"
    assert second.experts == first.experts


def of_ranks(*chains):
    """The plan of each rank, or its error."""
    exchange = Exchange(len(chains))
    steps = on_ranks(
        len(chains), lambda rank: Planner(chains[rank], Draws(), budget_s=0.2, exchange=exchange.of(rank)).next()
    )
    return [one if isinstance(one, Exception) else one.plan for one in steps]


def test_all_ranks_wait_for_a_late_one_where_nothing_else_keeps_the_caps():
    def slow(*step):
        time.sleep(1.0)
        return packed(*step)

    first, second = of_ranks(only_stock(packed), only_stock(slow))
    assert first.digest == second.digest
    assert first.made_by == second.made_by == "packing"
    failed = of_ranks(only_stock(packed), only_stock(fails))
    assert all(isinstance(one, EvenloadError) for one in failed)


def step_of(plan):
    return outcome_of(plan, chain().context).step_s


def test_all_ranks_take_the_least_stage_that_all_have():
    """One rank has its whole plan, the other only rules: both run the best of these."""
    first, second = of_ranks(chain(packed), chain(late))
    rules = [chain().rule(name, as_lengths(LENGTHS)) for name in chain().rivals.rules]
    assert step_of(first) == min(map(step_of, rules))
    assert first.made_by != "packing"
    assert first.digest == second.digest


def test_ranks_whose_stages_hold_other_plans_stop_with_one_message():
    def other(bare, *rest):
        plan = get("packing").baselines.rows["chunks"].plan(bare, *rest)
        return replace(plan, micro_batches=plan.micro_batches[::-1])

    first, second = of_ranks(chain(late), with_baseline(chain(late), other))
    assert isinstance(first, RankError)
    assert str(first) == str(second)


def test_a_step_waits_a_share_of_itself_and_what_earlier_ones_left(monkeypatch):
    monkeypatch.setattr(planner_module, "MOST_SAVED_S", 0.05)
    started = time.perf_counter()
    planner = Planner(chain(late), Draws())
    planned = [planner.next() for _ in range(4)]
    assert time.perf_counter() - started < 10
    assert [one.plan.made_by for one in planned] == ["chunks"] * 4
    assert max(one.waited_s for one in planned[1:]) < 10


def test_a_planner_that_is_late_ends_before_another_candidate():
    goes_on, ended, judged = threading.Event(), threading.Event(), []

    def slow(bare, *rest):
        try:
            assert goes_on.wait(30)
            judged.append(packed(bare, *rest))
            return judged[-1]
        finally:
            ended.set()

    planner = Planner(chain(slow), Draws(), budget_s=0.05)
    assert planner.next(ahead=False).plan.made_by == "chunks"
    goes_on.set()
    assert ended.wait(30)
    assert not judged


def test_ranks_that_plan_differently_stop_with_one_message():
    first, second = of_ranks(chain(), chain(otherwise))
    assert isinstance(first, RankError)
    assert str(first) == str(second)


class OfWeights(Draws):
    def __init__(self, weight, divisor=None):
        super().__init__()
        self._own = {"weight": weight, "divisor": divisor}

    def __call__(self):
        return super().__call__()._replace(**self._own)


def test_ranks_of_one_plan_and_other_weights_stop():
    """No plan knows the weights, so their digest travels with the plan's; where all are 1 there are none."""
    told = []

    def digests(*weights):
        told.clear()
        Planner(chain(), OfWeights(*weights), budget_s=60, exchange=lambda own: [told.append(own) or own]).next()
        return list(told)

    assert digests(1.0) == digests(1.0) != digests(0.5) == digests(0.5)
    assert digests(0.5, 8.0) == digests(0.5, 8.0) not in (digests(0.5), digests(0.5, 9.0), digests(1.0, 8.0))
    assert digests(1.0, {0: 8.0, 1: 2.0}) != digests(1.0, {0: 2.0, 1: 8.0}) != digests(1.0)
    (other,) = digests(2.0)
    bare = Planner(chain(), Draws(), budget_s=60, exchange=lambda own: [told.append(own) or own])
    assert bare.next().draw.weight_sums is None
    assert [told[-1]] == digests(1.0)
    with pytest.raises(RankError, match="ranks planned different steps"):
        Planner(chain(), OfWeights(0.5), budget_s=60, exchange=lambda own: [own, other]).next()
