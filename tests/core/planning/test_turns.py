"""Ranks of a node that take turns to plan: what travels, and what happens when it does not."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from evenload.core.errors import EvenloadError, RankError
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning import planner as planner_module
from evenload.core.planning.judge import judge
from evenload.core.planning.planner import Draw, Planner
from evenload.core.planning.turns import PlannerRotation, Received, Sender, dumped, fingerprint, loaded
from evenload.core.registry import Baselines

from ..by_hand import chain_of
from .ranks import LIMIT_S, Exchange, fails, late, on_ranks, otherwise, packed

STEPS = 6


def chain(*names, plan=None):
    """Packing and others on 4 ranks, two stages of them where there are pipelines; ``plan`` in place of packing's."""
    parallel = {"dp": 2, "pp": 2} if "pipeline" in names else {"dp": 2}
    made = chain_of({name: {"max_tokens": 64} for name in ("packing", *names)}, parallel=parallel)
    (packing, config), *others = made.links
    return replace(made, links=((replace(packing, plan=plan or packing.plan), config), *others))


def lengths_of(step):
    return np.random.default_rng(step).integers(4, 60, 8)


class Draws:
    def __init__(self, first=0, shift=0):
        self.step, self._shift = first, shift

    def __call__(self):
        self.step += 1
        return Draw(np.arange(8), lengths_of(self.step - 1) + self._shift, {"drawn": self.step})


class Board:
    """A board of threads."""

    def __init__(self):
        self.kept: dict[str, bytes] = {}

    def put(self, key, value):
        self.kept[key] = value

    def take(self, key, timeout_s):
        until_s = time.monotonic() + (LIMIT_S if timeout_s is None else timeout_s)
        while key not in self.kept and time.monotonic() < until_s:
            time.sleep(0.001)
        return self.kept.get(key)

    def drop(self, key):
        self.kept.pop(key, None)


class Node:
    """Ranks that share a board; by default those that tell each other what they plan."""

    def __init__(self, size=2):
        self.size, self.board, self.exchange = size, Board(), Exchange(size)

    def planner(self, rank, made, draws, *, place=None, budget_s=LIMIT_S, **how):
        turns = PlannerRotation(self.board, rank if place is None else place, self.size)
        how = {"steps_ahead": self.size, "turns": turns, "exchange": self.exchange.of(rank), **how}
        return Planner(made, draws, budget_s=budget_s, **how)

    def run(self, chains, draws, **how):
        """What each rank runs in each step, or the error with which it ended."""

        def work(rank):
            planner = self.planner(rank, chains[rank], draws[rank], **how)
            return [planner.next(ahead=STEPS - 1 - step) for step in range(STEPS)]

        return on_ranks(self.size, work)


@pytest.fixture(autouse=True)
def every_batch_is_worth_it(monkeypatch):
    monkeypatch.setattr(planner_module, "WORTH_S", 0.0)


def counted(counts, rank):
    def plan(*step):
        counts[rank] += 1
        return packed(*step)

    return plan


@pytest.mark.parametrize("names", [(), ("mesh",), ("mesh", "pipeline")])
def test_a_plan_that_travels_is_the_plan(names):
    made, batch = chain(*names), as_lengths(lengths_of(0))
    sent = judge(made.plan(batch).revised(notes=("why",)), made.context)
    read = loaded(dumped(sent), batch, made.limits)
    assert read.plan.digest == sent.plan.digest
    assert (read.plan.limits, read.plan.notes, read.plan.made_by) == (sent.plan.limits, ("why",), sent.plan.made_by)
    assert read[1:] == sent[1:]
    assert loaded(dumped(sent), as_lengths(lengths_of(1)), made.limits).plan.digest != sent.plan.digest


def test_what_is_no_plan_is_not_run():
    with pytest.raises(pickle.UnpicklingError, match=r"names .*\.getcwd"):
        loaded(pickle.dumps(__import__("os").getcwd), as_lengths([1]), chain().limits)


@pytest.mark.parametrize("size", [2, 4])
def test_each_step_is_planned_once_and_runs_on_all(size):
    counts, node = [0] * size, Node(size)
    plans = node.run([chain(plan=counted(counts, rank)) for rank in range(size)], [Draws() for _ in range(size)])
    alone = [chain().plan(as_lengths(lengths_of(step))) for step in range(STEPS)]
    assert counts == [len(range(rank, STEPS, size)) for rank in range(size)]
    for own in plans:
        assert [one.plan.digest for one in own] == [plan.digest for plan in alone]
        assert [one.draw.state for one in own] == [{"drawn": step + 1} for step in range(STEPS)]
    assert {key.partition(".")[0] for key in node.board.kept} == {str(STEPS - 1)}


def test_batches_that_are_quick_to_plan_are_planned_by_all(monkeypatch):
    monkeypatch.setattr(planner_module, "WORTH_S", 1e9)
    counts, node = [0, 0], Node()
    node.run([chain(plan=counted(counts, rank)) for rank in range(2)], [Draws(), Draws()])
    assert counts == [STEPS, STEPS]
    assert not node.board.kept


@pytest.mark.parametrize("steps_ahead", [1, 2, 3])
def test_a_run_that_goes_on_after_any_step_has_the_same_batches(steps_ahead):
    """What is drawn ahead is not in the state of the step that runs."""

    def run(first, steps):
        planner = Planner(chain(), Draws(first), budget_s=LIMIT_S, steps_ahead=steps_ahead)
        planned = [planner.next(ahead=steps - 1 - step) for step in range(steps)]
        return [(one.plan.digest, one.draw.state["drawn"]) for one in planned]

    whole = run(0, STEPS)
    for stop in range(1, STEPS):
        before = run(0, stop)
        assert before + run(before[-1][1], STEPS - stop) == whole


def test_no_more_is_drawn_than_the_data_holds():
    left = iter([Draws(step)() for step in range(3)])
    planner = Planner(chain(), left.__next__, budget_s=LIMIT_S, steps_ahead=4)
    planner.prepare(3)
    assert [planner.next(ahead=2 - step).draw.state["drawn"] for step in range(3)] == [1, 2, 3]
    with pytest.raises(StopIteration):
        planner.next(ahead=0)


def test_a_late_rank_takes_its_own_steps_to_the_stage_that_all_have():
    first, second = Node().run([chain(), chain(plan=late)], [Draws(), Draws()], budget_s=0.5)
    assert [one.plan.digest for one in first] == [one.plan.digest for one in second]
    whole = [chain().plan(as_lengths(lengths_of(step))).digest for step in range(STEPS)]
    assert [one.plan.digest == digest for one, digest in zip(first, whole, strict=True)][::2] == [True] * 3
    for one in first[1::2]:
        assert one.plan.made_by != "packing"
        assert "late on ranks [0, 1]" in one.plan.notes[-1]


def test_a_planner_that_fails_on_one_rank_hands_over_on_all(caplog):
    with caplog.at_level(logging.WARNING, "evenload"):
        first, second = Node().run([chain(plan=fails), chain()], [Draws(), Draws()])
    assert [one.plan.digest for one in first] == [one.plan.digest for one in second]
    assert ["failed on ranks [0, 1]" in str(one.plan.notes) for one in second] == [True, False] * 3
    assert "on the rank of the node that planned: ZeroDivisionError: inside a planner" in str(second[0].plan.notes)


def test_all_end_alike_where_nothing_may_run():
    ((plugin, config),) = chain(plan=fails).links
    none = replace(chain(plan=fails), links=((replace(plugin, baselines=Baselines()), config),), micro_batch_size=4)
    first, second = Node().run([none, none], [Draws(), Draws()])
    assert isinstance(first, EvenloadError)
    assert first.what == second.what == "no planner could plan this step under the caps and settings of the recipe"


def test_ranks_that_draw_other_batches_stop_with_one_message():
    first, second = Node().run([chain(), chain()], [Draws(), Draws(shift=1)])
    assert isinstance(first, RankError)
    assert str(first) == str(second)


def test_a_plan_of_another_step_stops_all_with_one_message(monkeypatch):
    take = Board.take

    def stale(board, key, timeout_s):
        return take(board, f"0{key[1:]}" if key.startswith("2") else key, timeout_s)

    monkeypatch.setattr(Board, "take", stale)
    monkeypatch.setattr(Board, "drop", lambda board, key: None)
    first, second = Node().run([chain(), chain()], [Draws(), Draws()])
    assert isinstance(first, RankError)
    assert str(first) == str(second)
    assert "step 2: ranks planned different steps" in str(first)


def test_nodes_that_plan_differently_stop_with_one_message():
    nodes = [Node(), Node()]
    nodes[0].exchange = nodes[1].exchange = Exchange(4)

    def work(rank):
        made = chain(plan=otherwise) if rank == 3 else chain()
        planner = nodes[rank // 2].planner(rank, made, Draws(), place=rank % 2)
        return [planner.next() for _ in range(STEPS)]

    out = on_ranks(4, work)
    assert len(set(map(str, out))) == 1
    assert "step 1: ranks planned different steps" in str(out[0])


def test_a_rank_makes_one_plan_at_a_time():
    running, most = 0, 0
    lock = threading.Lock()

    def plan(*step):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return packed(*step)

    planner = Planner(chain(plan=plan), Draws(), budget_s=LIMIT_S, steps_ahead=3)
    planner.prepare()
    for step in range(STEPS):
        planner.next(ahead=STEPS - 1 - step)
    assert most == 1


def test_a_stage_that_nothing_lawful_has_reached_has_no_plan():
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
    assert found.plan.digest == best.plan.digest
    with pytest.raises(TimeoutError):
        received.result(0.01)
    sender.end(0.25)
    assert received.result(0.01)[1] == 0.25
    sender.drop()
    assert not board.kept


def test_chains_that_plan_alike_have_one_fingerprint():
    assert fingerprint(chain("mesh")) == fingerprint(chain("mesh"))
    made = chain()
    changed = replace(made, limits=replace(made.limits, max_tokens=32))
    assert len({fingerprint(one) for one in (chain("mesh"), made, changed, replace(made, instead="chunks"))}) == 4
