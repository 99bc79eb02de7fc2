"""The planner: one agreed plan a step, and what happens when a planner is late, fails or breaks a law."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError, RankError
from evenload.core.laws import check
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.planning import planner as planner_module
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.core.planning.planner import Draw, Planner
from evenload.core.recipe.recipe import parse
from evenload.core.registry import Plugin, get

load_plugins()
LENGTHS = np.array([50, 40, 30, 30, 20, 10, 10, 5])


def chain(plan: Callable[..., StepPlan] | None = None) -> PlanChain:
    """The packing chain on 2 ranks, its planner replaced if one is given."""
    recipe = parse(
        {"parallel": {"dp": 2}, "plugins": {"packing": {"enabled": True, "max_tokens": 64, "slices": "off"}}}
    )
    made = PlanChain.of_recipe(recipe, recipe.layout())
    if plan is None:
        return made
    plugin: Plugin = replace(get("packing"), plan=plan)
    return replace(made, links=((plugin, made.links[0][1]),))


class Draws:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Draw:
        self.count += 1
        return Draw(np.arange(8), LENGTHS, {"consumed": 8 * self.count})


@pytest.mark.parametrize("background", [True, False])
def test_plans_are_made_ahead_and_keep_their_own_state(background: bool) -> None:
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

    def __call__(self) -> Draw:
        return super().__call__()._replace(tenants=self.tenants)


@pytest.mark.parametrize("background", [True, False])
def test_tenants_of_a_draw_are_those_of_its_plan(background: bool) -> None:
    planned = Planner(chain(), OfTenants(), background=background, budget_s=60).next()
    assert planned.plan.tenants.tolist() == OfTenants.tenants.tolist()
    assert planned.plan.digest != Planner(chain(), Draws(), background=background, budget_s=60).next().plan.digest


def test_a_plan_that_takes_over_has_the_tenants() -> None:
    planned = Planner(chain(fails), OfTenants(), budget_s=60).next()
    assert planned.plan.made_by == "chunks"
    assert planned.plan.tenants.tolist() == OfTenants.tenants.tolist()


def late(*_: object) -> StepPlan:
    time.sleep(30)
    raise AssertionError("nobody waits for this")


def fails(*_: object) -> StepPlan:
    raise ZeroDivisionError("inside a planner")


def unlawful(bare: StepPlan, *_: object) -> StepPlan:
    return replace(bare, micro_batches=(), made_by="unlawful")


@pytest.mark.parametrize(("plan", "word"), [(late, "late"), (fails, "failed"), (unlawful, "failed")])
def test_a_bad_planner_hands_over_loudly(
    plan: Callable[..., StepPlan], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    planner = Planner(chain(plan), Draws(), budget_s=0.05)
    with caplog.at_level(logging.WARNING, "evenload"):
        planned = planner.next()
    assert planned.plan.made_by == "chunks"
    assert check(planned.plan)
    assert word in planned.plan.notes[-1]
    assert "'chunks' runs" in caplog.text


def test_the_stock_plan_is_the_last_resort(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made = chain(fails)
    ((plugin, config),) = made.links
    broken = replace(plugin, baselines={"chunks": lambda *_: unlawful(_[0])})
    with caplog.at_level(logging.WARNING, "evenload"):
        planned = Planner(replace(made, links=((broken, config),)), Draws(), budget_s=60).next()
    assert planned.plan.made_by == "stock"
    assert "'chunks' failed too" in caplog.text


def only_stock(plan: Callable[..., StepPlan]) -> PlanChain:
    """A chain that nothing but stock could take over from, and stock's two samples at once are over its cap."""
    ((plugin, config),) = chain(plan).links
    return replace(chain(plan), links=((replace(plugin, simpler="", quick=()), config),), micro_batch_size=2)


def test_stock_that_breaks_a_cap_does_not_take_over(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "evenload"),
        pytest.raises(EvenloadError, match="no planner could plan this step under the caps") as caught,
    ):
        Planner(only_stock(fails), Draws(), budget_s=60).next()
    assert "ZeroDivisionError: inside a planner" in caught.value.found
    assert "100 tokens on a rank, cap 64" in caplog.text


def test_a_late_plan_is_waited_for_where_nothing_else_keeps_the_caps(caplog: pytest.LogCaptureFixture) -> None:
    goes_on = threading.Event()

    def slow(bare: StepPlan, *rest: object) -> StepPlan:
        assert goes_on.wait(30)
        return get("packing").plan(bare, *rest)  # type: ignore[arg-type]

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "the step waits" in record.getMessage():
                goes_on.set()

    logging.getLogger("evenload").addHandler(handler := Told())
    try:
        planned = Planner(only_stock(slow), Draws(), budget_s=0.01).next()
    finally:
        logging.getLogger("evenload").removeHandler(handler)
    assert planned.plan.made_by == "packing"
    assert planned.plan.notes[-1] == "waited for: late on ranks [0]"


def test_what_plans_leave_out_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    recipe = parse(
        {
            "parallel": {"dp": 2},
            "plugins": {
                "packing": {"enabled": True, "max_tokens": 40, "slices": "off"},
                "mesh": {"enabled": True, "max_tokens": 48},
            },
        }
    )
    planner = Planner(PlanChain.of_recipe(recipe, recipe.layout()), Draws(), budget_s=60)
    with caplog.at_level(logging.WARNING, "evenload"):
        for _ in range(3):
            planner.next()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("left out of this plan: packing: a sequence is longer than plugins.packing.max_t")
    assert said[1] == "the least max_tokens of all plugins holds: packing 40, mesh 48"


def test_a_fallback_that_crashes_hands_over_too(caplog: pytest.LogCaptureFixture) -> None:
    ((plugin, config),) = chain(fails).links
    broken = replace(plugin, baselines={"chunks": fails})
    with caplog.at_level(logging.WARNING, "evenload"):
        planned = Planner(replace(chain(fails), links=((broken, config),)), Draws(), budget_s=60).next()
    assert planned.plan.made_by == "stock"
    assert "'chunks' failed too: inside a planner" in caplog.text


def short(bare: StepPlan, *rest: object) -> StepPlan:
    return replace(get("packing").plan(bare, *rest), made_by="other")  # type: ignore[arg-type]


@pytest.mark.parametrize("background", [True, False])
def test_another_chain_takes_over_with_the_next_plan_that_is_begun(background: bool) -> None:
    old, new = chain(), chain(short)
    planner = Planner(old, Draws(), background=background, budget_s=60)
    assert planner.chain_of_next is old
    planner.next()
    planner.use(new)
    assert planner.chain_of_next is (old if background else new)
    made = [planner.next() for _ in range(2)]
    assert [p.plan.made_by for p in made] == (["packing", "other"] if background else ["other", "other"])
    assert [p.chain is new for p in made] == [not background, True]
    resumed = Planner(new, Draws(), background=background, first=old, budget_s=60)
    assert [resumed.next().chain for _ in range(3)] == [old, new, new]


def test_a_fallback_uses_what_its_plan_was_begun_with() -> None:
    failing = chain(fails)
    ((plugin, config),) = failing.links
    marked = replace(plugin, baselines={"chunks": short})
    planner = Planner(replace(failing, links=((marked, config),)), Draws(), budget_s=60)
    planner.next()
    planner.use(chain())
    assert planner.next().plan.made_by == "other"
    assert planner.next().plan.made_by == "packing"


def test_a_fallback_goes_on_with_the_policy_of_experts_of_the_step_before() -> None:
    packs = {"enabled": True, "max_tokens": 64, "slices": "off"}
    experts = {"family": "mixtral", "moe": {"num_experts": 4}}
    plugins = {"packing": packs, "moe": {"enabled": True, "mode": "clone", "slots": 1}}
    recipe = parse({"model": experts, "parallel": {"dp": 2, "ep": 2}, "plugins": plugins})
    whole = PlanChain.of_recipe(recipe, recipe.layout())
    ((packing, config), *others) = whole.links
    turns = iter((packing.plan, fails))
    link = replace(packing, plan=lambda *step: next(turns)(*step)), config
    planner = Planner(replace(whole, links=(link, *others)), Draws(), background=False)
    first, second = planner.next().plan, planner.next().plan
    assert (first.made_by, second.made_by) == ("packing", "chunks")
    assert first.experts.planner == "clone"
    assert second.experts == first.experts


class Ranks:
    """Two ranks in two threads, whose exchange is a pair of barriers."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=20)
        self.slots: list[bytes] = [b"", b""]

    def exchange(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def swap(payload: bytes) -> list[bytes]:
            self.slots[rank] = payload
            self.barrier.wait()
            told = list(self.slots)
            self.barrier.wait()
            return told

        return swap

    def run(self, chains: list[PlanChain]) -> list[StepPlan | Exception]:
        out: list[StepPlan | Exception] = [AssertionError(), AssertionError()]

        def work(rank: int) -> None:
            try:
                out[rank] = Planner(chains[rank], Draws(), budget_s=0.2, exchange=self.exchange(rank)).next().plan
            except Exception as error:
                out[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return out


def test_one_late_rank_takes_all_ranks_to_the_simpler_plan() -> None:
    first, second = Ranks().run([chain(), chain(late)])
    assert isinstance(first, StepPlan)
    assert isinstance(second, StepPlan)
    assert first.made_by == second.made_by == "chunks"
    assert first.digest == second.digest


def test_all_ranks_wait_for_a_late_one_where_nothing_else_keeps_the_caps() -> None:
    def slow(bare: StepPlan, *rest: object) -> StepPlan:
        time.sleep(1.0)
        return get("packing").plan(bare, *rest)  # type: ignore[arg-type]

    quick = get("packing").plan
    first, second = Ranks().run([only_stock(quick), only_stock(slow)])
    assert isinstance(first, StepPlan)
    assert isinstance(second, StepPlan)
    assert first.digest == second.digest
    assert first.made_by == second.made_by == "packing"
    failed = Ranks().run([only_stock(quick), only_stock(fails)])
    assert all(isinstance(one, EvenloadError) for one in failed)


def step_of(plan: StepPlan) -> float:
    return outcome_of(plan, chain().context).step_s


def test_all_ranks_take_the_least_stage_that_all_have() -> None:
    """One rank has its whole plan, the other only rules: both run the best of these."""

    def whole(bare: StepPlan, *rest: object) -> StepPlan:
        return get("packing").plan(bare, *rest)  # type: ignore[arg-type]

    first, second = Ranks().run([chain(whole), chain(late)])
    assert isinstance(first, StepPlan)
    assert isinstance(second, StepPlan)
    rules = [chain().rule(name, as_lengths(LENGTHS)) for name in chain().rules]
    assert step_of(first) == min(map(step_of, rules))
    assert first.made_by != "packing"
    assert first.digest == second.digest


def test_ranks_whose_stages_hold_other_plans_stop_with_one_message() -> None:
    def other(bare: StepPlan, *rest: object) -> StepPlan:
        plan = get("packing").baselines["chunks"](bare, *rest)  # type: ignore[arg-type]
        return replace(plan, micro_batches=plan.micro_batches[::-1])

    ((plugin, config),) = chain(late).links
    unlike = replace(chain(late), links=((replace(plugin, baselines={"chunks": other}), config),))
    first, second = Ranks().run([chain(late), unlike])
    assert isinstance(first, RankError)
    assert str(first) == str(second)


def test_a_step_waits_a_share_of_itself_and_what_earlier_ones_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "MOST_SAVED_S", 0.05)
    started = time.perf_counter()
    planner = Planner(chain(late), Draws())
    planned = [planner.next() for _ in range(4)]
    assert time.perf_counter() - started < 10
    assert [one.plan.made_by for one in planned] == ["chunks"] * 4
    assert max(one.waited_s for one in planned[1:]) < 10


def test_a_planner_that_is_late_ends_before_another_candidate() -> None:
    goes_on, ended, judged = threading.Event(), threading.Event(), []

    def slow(bare: StepPlan, *rest: object) -> StepPlan:
        try:
            assert goes_on.wait(30)
            plan = get("packing").plan(bare, *rest)  # type: ignore[arg-type]
            judged.append(plan)
            return plan
        finally:
            ended.set()

    planner = Planner(chain(slow), Draws(), budget_s=0.05)
    assert planner.next(ahead=False).plan.made_by == "chunks"
    goes_on.set()
    assert ended.wait(30)
    assert not judged


def test_ranks_that_plan_differently_stop_with_one_message() -> None:
    def other(bare: StepPlan, *rest: object) -> StepPlan:
        plan = get("packing").plan(bare, *rest)  # type: ignore[arg-type]
        return replace(plan, micro_batches=plan.micro_batches[::-1])

    first, second = Ranks().run([chain(), chain(other)])
    assert isinstance(first, RankError)
    assert str(first) == str(second)


class OfWeights(Draws):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self._weight = weight

    def __call__(self) -> Draw:
        return super().__call__()._replace(weight=self._weight)


def test_ranks_of_one_plan_and_other_weights_stop() -> None:
    """No plan knows the weights, so their digest travels with the plan's; where all are 1 there are none."""
    told = list[bytes]()

    def digests(weight: float) -> list[bytes]:
        told.clear()
        Planner(chain(), OfWeights(weight), budget_s=60, exchange=lambda own: [told.append(own) or own]).next()
        return list(told)

    assert digests(1.0) == digests(1.0) != digests(0.5) == digests(0.5)
    (other,) = digests(2.0)
    bare = Planner(chain(), Draws(), budget_s=60, exchange=lambda own: [told.append(own) or own])
    assert bare.next().draw.weight_sums is None
    assert [told[-1]] == digests(1.0)
    with pytest.raises(RankError, match="ranks planned different steps"):
        Planner(chain(), OfWeights(0.5), budget_s=60, exchange=lambda own: [own, other]).next()


def test_a_batch_nobody_can_plan_is_an_error() -> None:
    with pytest.raises(EvenloadError, match=r"longer than plugins\.packing\.max_tokens"):
        chain().plan(as_lengths([65]))
