"""Ranks of a node that take turns to plan: what travels, and what happens when it does not."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError, RankError
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.planning import planner as planner_module
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import judge
from evenload.core.planning.planner import Draw, Planner
from evenload.core.planning.turns import Received, Sender, Turns, dumped, fingerprint, loaded
from evenload.core.recipe.recipe import parse
from evenload.core.registry import get

load_plugins()
STEPS = 6
LIMIT_S = 60


def chain(*names: str, plan: Callable[..., StepPlan] | None = None) -> PlanChain:
    """Packing and others on 4 ranks, two stages of them where there are pipelines; ``plan`` in place of packing's."""
    plugins = {name: {"enabled": True, "max_tokens": 64} for name in ("packing", *names)}
    layout = {"dp": 2, "pp": 2} if "pipeline" in names else {"dp": 2}
    recipe = parse({"parallel": layout, "plugins": plugins})
    made = PlanChain.of_recipe(recipe, recipe.layout())
    first, *others = made.links
    return replace(made, links=((replace(first[0], plan=plan or first[0].plan), first[1]), *others))


def lengths_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(4, 60, 8)


class Draws:
    def __init__(self, first: int = 0, shift: int = 0) -> None:
        self.step, self._shift = first, shift

    def __call__(self) -> Draw:
        self.step += 1
        return Draw(np.arange(8), lengths_of(self.step - 1) + self._shift, {"drawn": self.step})


class Board:
    """A board of threads."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.kept[key] = value

    def take(self, key: str, timeout_s: float | None) -> bytes | None:
        until_s = time.monotonic() + (LIMIT_S if timeout_s is None else timeout_s)
        while key not in self.kept and time.monotonic() < until_s:
            time.sleep(0.001)
        return self.kept.get(key)

    def drop(self, key: str) -> None:
        self.kept.pop(key, None)


class Node:
    """Ranks in threads, whose exchange is a pair of barriers."""

    def __init__(self, size: int = 2) -> None:
        self.size, self.board = size, Board()
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self.slots = [b""] * size

    def exchange(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def swap(payload: bytes) -> list[bytes]:
            self.slots[rank] = payload
            self.barrier.wait()
            every = list(self.slots)
            self.barrier.wait()
            return every

        return swap

    def run(
        self, chains: list[PlanChain], draws: list[Draws], steps: int = STEPS, budget_s: float = LIMIT_S, **how: int
    ) -> list[list[planner_module.Planned] | Exception]:
        out: list[list[planner_module.Planned] | Exception] = [AssertionError()] * self.size

        def work(rank: int) -> None:
            turns = Turns(self.board, rank, self.size)
            more = {"steps_ahead": self.size, **how}
            planner = Planner(
                chains[rank], draws[rank], budget_s=budget_s, exchange=self.exchange(rank), turns=turns, **more
            )
            try:
                out[rank] = [planner.next(ahead=steps - 1 - step) for step in range(steps)]
            except Exception as error:
                out[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return out


@pytest.fixture(autouse=True)
def every_batch_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "WORTH_S", 0.0)


def counted(counts: list[int], rank: int) -> Callable[..., StepPlan]:
    def plan(bare: StepPlan, *rest: object) -> StepPlan:
        counts[rank] += 1
        return get("packing").plan(bare, *rest)  # type: ignore[arg-type]

    return plan


def late(*_: object) -> StepPlan:
    time.sleep(30)
    raise AssertionError("nobody waits for this")


def fails(*_: object) -> StepPlan:
    raise ZeroDivisionError("inside a planner")


def other(bare: StepPlan, *rest: object) -> StepPlan:
    plan = get("packing").plan(bare, *rest)  # type: ignore[arg-type]
    return replace(plan, micro_batches=plan.micro_batches[::-1])


@pytest.mark.parametrize("names", [(), ("mesh",), ("mesh", "pipeline")])
def test_a_plan_that_travels_is_the_plan(names: tuple[str, ...]) -> None:
    made, batch = chain(*names), as_lengths(lengths_of(0))
    sent = judge(made.plan(batch).revised(notes=("why",)), made.context)
    read = loaded(dumped(sent), batch, made.limits)
    assert read.plan.digest == sent.plan.digest
    assert (read.plan.limits, read.plan.notes, read.plan.made_by) == (sent.plan.limits, ("why",), sent.plan.made_by)
    assert read[1:] == sent[1:]
    assert loaded(dumped(sent), as_lengths(lengths_of(1)), made.limits).plan.digest != sent.plan.digest


def test_what_is_no_plan_is_not_run() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"names .*\.getcwd"):
        loaded(pickle.dumps(__import__("os").getcwd), as_lengths([1]), chain().limits)


@pytest.mark.parametrize("size", [2, 4])
def test_each_step_is_planned_once_and_runs_on_all(size: int) -> None:
    counts, node = [0] * size, Node(size)
    plans = node.run([chain(plan=counted(counts, rank)) for rank in range(size)], [Draws() for _ in range(size)])
    alone = [chain().plan(as_lengths(lengths_of(step))) for step in range(STEPS)]
    assert counts == [len(range(rank, STEPS, size)) for rank in range(size)]
    for own in plans:
        assert isinstance(own, list)
        assert [one.plan.digest for one in own] == [plan.digest for plan in alone]
        assert [one.draw.state for one in own] == [{"drawn": step + 1} for step in range(STEPS)]
    assert {key.partition(".")[0] for key in node.board.kept} == {str(STEPS - 1)}


def test_batches_that_are_quick_to_plan_are_planned_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "WORTH_S", 1e9)
    counts, node = [0, 0], Node()
    node.run([chain(plan=counted(counts, rank)) for rank in range(2)], [Draws(), Draws()])
    assert counts == [STEPS, STEPS]
    assert not node.board.kept


@pytest.mark.parametrize("steps_ahead", [1, 2, 3])
def test_a_run_that_goes_on_after_any_step_has_the_same_batches(steps_ahead: int) -> None:
    """What is drawn ahead is not in the state of the step that runs."""

    def run(first: int, steps: int) -> list[tuple[bytes, int]]:
        planner = Planner(chain(), Draws(first), budget_s=LIMIT_S, steps_ahead=steps_ahead)
        planned = [planner.next(ahead=steps - 1 - step) for step in range(steps)]
        return [(one.plan.digest, one.draw.state["drawn"]) for one in planned]

    whole = run(0, STEPS)
    for stop in range(1, STEPS):
        before = run(0, stop)
        assert before + run(before[-1][1], STEPS - stop) == whole


def test_no_more_is_drawn_than_the_data_holds() -> None:
    left = iter([Draws(step)() for step in range(3)])
    planner = Planner(chain(), left.__next__, budget_s=LIMIT_S, steps_ahead=4)
    planner.prepare(3)
    assert [planner.next(ahead=2 - step).draw.state["drawn"] for step in range(3)] == [1, 2, 3]
    with pytest.raises(StopIteration):
        planner.next(ahead=0)


def test_a_late_rank_takes_its_own_steps_to_the_stage_that_all_have() -> None:
    first, second = Node().run([chain(), chain(plan=late)], [Draws(), Draws()], budget_s=0.5)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert [one.plan.digest for one in first] == [one.plan.digest for one in second]
    whole = [chain().plan(as_lengths(lengths_of(step))).digest for step in range(STEPS)]
    assert [one.plan.digest == digest for one, digest in zip(first, whole, strict=True)][::2] == [True] * 3
    for one in first[1::2]:
        assert one.plan.made_by != "packing"
        assert "late on ranks [0, 1]" in one.plan.notes[-1]


def test_a_planner_that_fails_on_one_rank_hands_over_on_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "evenload"):
        first, second = Node().run([chain(plan=fails), chain()], [Draws(), Draws()])
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert [one.plan.digest for one in first] == [one.plan.digest for one in second]
    assert ["failed on ranks [0, 1]" in str(one.plan.notes) for one in second] == [True, False] * 3
    assert "on the rank of the node that planned: ZeroDivisionError: inside a planner" in str(second[0].plan.notes)


def test_all_end_alike_where_nothing_may_run() -> None:
    ((plugin, config),) = chain(plan=fails).links
    none = replace(chain(plan=fails), links=((replace(plugin, simpler="", quick=()), config),), micro_batch_size=4)
    first, second = Node().run([none, none], [Draws(), Draws()])
    assert isinstance(first, EvenloadError)
    assert isinstance(second, EvenloadError)
    assert first.what == second.what == "no planner could plan this step under the caps and settings of the recipe"


def test_ranks_that_draw_other_batches_stop_with_one_message() -> None:
    first, second = Node().run([chain(), chain()], [Draws(), Draws(shift=1)])
    assert isinstance(first, RankError)
    assert str(first) == str(second)


def test_a_plan_of_another_step_stops_all_with_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Board.take

    def stale(board: Board, key: str, timeout_s: float | None) -> bytes | None:
        return take(board, f"0{key[1:]}" if key.startswith("2") else key, timeout_s)

    monkeypatch.setattr(Board, "take", stale)
    monkeypatch.setattr(Board, "drop", lambda board, key: None)
    first, second = Node().run([chain(), chain()], [Draws(), Draws()])
    assert isinstance(first, RankError)
    assert str(first) == str(second)
    assert "step 2: ranks planned different steps" in str(first)


def test_nodes_that_plan_differently_stop_with_one_message() -> None:
    nodes, out = [Node(4), Node(4)], []
    nodes[1].barrier, nodes[1].slots = nodes[0].barrier, nodes[0].slots

    def work(rank: int) -> None:
        node, place = nodes[rank // 2], rank % 2
        made = chain(plan=other) if rank == 3 else chain()
        how = {"exchange": node.exchange(rank), "turns": Turns(node.board, place, 2), "steps_ahead": 2}
        planner = Planner(made, Draws(), budget_s=LIMIT_S, **how)
        try:
            out.append([planner.next() for _ in range(STEPS)])
        except RankError as error:
            out.append(str(error))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(str, out))) == 1
    assert "step 1: ranks planned different steps" in out[0]


def test_a_rank_makes_one_plan_at_a_time() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def plan(bare: StepPlan, *rest: object) -> StepPlan:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return get("packing").plan(bare, *rest)  # type: ignore[arg-type]

    planner = Planner(chain(plan=plan), Draws(), budget_s=LIMIT_S, steps_ahead=3)
    planner.prepare()
    for step in range(STEPS):
        planner.next(ahead=STEPS - 1 - step)
    assert most == 1


def test_a_stage_that_nothing_lawful_has_reached_has_no_plan() -> None:
    board, made, batch = Board(), chain(), as_lengths(lengths_of(0))
    sender, received = Sender(board, 5), Received(made, batch, board, 5)
    assert (received.reached, received.best_s, received.at(0)) == (0, 0.0, None)
    sender.stage(None)
    assert (received.reached, received.best_s, received.at(1)) == (1, 0.0, None)
    best = judge(made.rule("chunks", batch), made.context)
    sender.stage(best)
    sender.stage(best)
    assert (received.reached, received.best_s) == (3, best.step_s)
    assert received.at(1) is None
    found = received.at(3)
    assert found is not None
    assert found.plan.digest == best.plan.digest
    with pytest.raises(TimeoutError):
        received.result(0.01)
    sender.end(0.25)
    assert received.result(0.01)[1] == 0.25
    sender.drop()
    assert not board.kept


def test_chains_that_plan_alike_have_one_fingerprint() -> None:
    assert fingerprint(chain("mesh")) == fingerprint(chain("mesh"))
    made = chain()
    changed = replace(made, limits=replace(made.limits, max_tokens=32))
    assert len({fingerprint(one) for one in (chain("mesh"), made, changed, replace(made, instead="chunks"))}) == 4
