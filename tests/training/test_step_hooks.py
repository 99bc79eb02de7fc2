"""Hooks of a run: what each may do around a step, and how a run goes on from what they have kept."""

import logging
from types import SimpleNamespace

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.function_rows import FunctionRows
from evenload.core.run_hooks import RunHook
from evenload.training import step_hooks
from evenload.training.step_hooks import RunContext, StepHook, StepHooks, run_hooks


class Counting(StepHook):
    """Counts steps; as many batches as ``ahead`` may be drawn ahead."""

    anew = "steps are counted anew"

    def __init__(self, key="count", ahead=9):
        self.key, self.steps, self.ahead = key, 0, ahead

    def before(self, planner):
        return self.ahead

    def planned(self, planned):
        return [*planned, self.key]

    def after(self, planner, step):
        self.steps += 1

    def state(self, planner):
        return {"steps": self.steps}

    def restore(self, saved):
        if saved["steps"] < 0:
            raise ValueError("no number of steps")
        self.steps = saved["steps"]

    def report(self, train_s):
        return {self.key: self.steps}


class WithDraw(Counting):
    kept_with_draw = True


class Off(Counting):
    on = False


def test_hooks_do_their_part_in_turn():
    hooks = StepHooks([Counting("one"), Counting("two", ahead=3), Off("three", ahead=0)])
    planner = SimpleNamespace(next=lambda ahead: [ahead])
    assert hooks.next(planner, 5) == [3, "one", "two"], "what is drawn ahead is what all allow"
    assert hooks.next(planner, 1) == [1, "one", "two"]
    hooks.after(planner, None)
    assert hooks.state(planner) == {"one": {"steps": 1}, "two": {"steps": 1}}
    assert hooks.report(1.0) == {"one": 1, "two": 1}
    assert StepHooks([StepHook()]).next(planner, 5) == [5]
    assert StepHooks([StepHook()]).state(planner) == {}


def test_what_is_kept_comes_back():
    one, drawn, off = Counting("one"), WithDraw("two"), Off("three")
    hooks = StepHooks([one, drawn, off])
    assert hooks.state(None) == {"one": {"steps": 0}}, "the drawing keeps the other one's"
    hooks.restore({"one": {"steps": 4}, "order": {"two": {"steps": 3}}, "three": {"steps": 5}})
    assert (one.steps, drawn.steps, off.steps) == (4, 3, 0)


@pytest.mark.parametrize(
    ("state", "why"),
    [({}, "KeyError: 'count'"), ({"count": 3}, "TypeError"), ({"count": {"steps": -1}}, "ValueError: no number")],
)
def test_a_run_says_which_hooks_start_anew(state, why, caplog):
    hook = Counting()
    with caplog.at_level(logging.INFO, "evenload"):
        StepHooks([hook]).restore(state)
    assert hook.steps == 0
    assert f"steps are counted anew: the checkpoint has nothing of it that fits ({why}" in caplog.text


def test_a_run_says_what_it_leaves_unread(caplog):
    hooks = StepHooks([Counting("one"), WithDraw("select")])
    state = {"step": 4, "recipe": {}, "data": {}, "refit": {}, "order": {"select": {}, "seed": 1}, "one": {}}
    hooks.warn_of_unread(state)
    assert not caplog.records
    hooks.warn_of_unread(state | {"two": {}})
    StepHooks([]).warn_of_unread(state)
    assert [(row.levelname, row.message) for row in caplog.records] == [
        ("WARNING", "the checkpoint has the state of 'two', which this run neither reads nor keeps"),
        ("WARNING", "the checkpoint has the state of 'one' and 'select', which this run neither reads nor keeps"),
    ]


def test_what_is_refused_is_no_beginning_anew():
    hook = Counting()
    hook.restore = _refuse
    with pytest.raises(EvenloadError, match="planted"):
        StepHooks([hook]).restore({"count": {}})


def _refuse(saved):
    raise EvenloadError("planted")


def theirs(run):
    return [Counting(run.job)]


def test_rows_make_the_hooks_of_a_run(monkeypatch):
    rows = FunctionRows("run hook", RunHook)
    monkeypatch.setattr(step_hooks, "RUN_HOOKS", rows)
    rows.register(RunHook("second", f"{__name__}:theirs"))
    rows.register(RunHook("first", f"{__name__}:theirs", order=1))
    with pytest.raises(EvenloadError, match="two parts of a checkpoint are called 'mine'") as refused:
        run_hooks(RunContext("mine", None))
    assert refused.value.found == "one is of the run hook 'second'"
    with pytest.raises(EvenloadError, match="called 'order'"):
        run_hooks(RunContext("order", None))
    assert [type(hook) for hook in run_hooks(RunContext("", None))] == [Counting, Counting], "none has a state"
    rows.register(RunHook("third", "no_such_module:hooks"))
    with pytest.raises(EvenloadError, match="the run hook 'third' cannot be imported"):
        run_hooks(RunContext("", None))
