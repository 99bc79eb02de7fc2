"""Halving depends on losses alone: not on who trains beside whom, nor on a resume in the middle."""

import json
import math

import pytest
from evenload.plugins.lora.sweeps.halving import Halving
from hypothesis import given
from hypothesis import strategies as st

STEPS, EVERY = 32, 4


def race(losses, abreast, resumed=False):
    """(trials that ran to the end, those dropped by rung), of trials that train ``abreast`` at a time."""
    names = [f"t{number}" for number in range(len(losses))]
    halving, dropped = Halving(names, EVERY, STEPS), []
    steps, queue, ends = dict.fromkeys(names, 0), list(names), []
    while queue:
        for name in queue[:abreast]:
            steps[name] += 1
            if halving.rung_at(steps[name]):
                halving.arrive(name, steps[name], losses[int(name[1:])][steps[name] // EVERY - 1])
            elif steps[name] == STEPS:
                halving.end(name, losses[int(name[1:])][-1])
                ends.append(name)
        if verdict := halving.close():
            dropped.append(list(verdict.dropped))
        if resumed:
            halving = Halving(names, EVERY, STEPS, json.loads(json.dumps(halving.state())))
        out = {name for names_of_rung in dropped for name in names_of_rung}
        alive = [name for name in names if name not in out and name not in ends]
        queue = [name for name in alive if not halving.waits(name, steps[name])]
    assert halving.over
    return ends, dropped


LOSSES = st.lists(
    st.lists(st.sampled_from([1.0, 2.0, 3.0, math.nan, math.inf]), min_size=8, max_size=8), min_size=1, max_size=9
)


@given(LOSSES, st.integers(1, 9))
def test_the_race_is_the_same_however_many_trials_fit_at_once(losses, abreast):
    together = race(losses, len(losses))
    assert race(losses, abreast) == together
    assert race(losses, abreast, resumed=True) == together
    assert len(together[0]) == 1 or len(losses) > 2 ** (STEPS // EVERY - 1)


@given(LOSSES)
def test_the_worse_half_ends_at_each_rung(losses):
    _, dropped = race(losses, len(losses))
    alive = [f"t{number}" for number in range(len(losses))]
    for rung, names in enumerate(dropped):
        assert len(names) == len(alive) // 2
        going = [name for name in alive if name not in names]
        worst = max(_finite(losses[int(name[1:])][rung]) for name in going)
        assert all(_finite(losses[int(name[1:])][rung]) >= worst for name in names)
        alive = going


def _finite(loss):
    return loss if math.isfinite(loss) else math.inf


def test_ties_go_by_the_order_of_the_sweep():
    assert race([[1.0] * 8] * 4, 4) == (["t0"], [["t2", "t3"], ["t1"], [], [], [], [], []])


def test_a_trial_that_failed_holds_up_nobody_and_one_that_stopped_stays_in_the_race():
    halving = Halving(["a", "b", "c", "d"], 5, 20)
    halving.fail("a")
    halving.end("b", 0.5)
    halving.arrive("c", 5, 1.0)
    assert halving.close() is None
    assert halving.waits("c", 5)
    halving.arrive("d", 5, 2.0)
    verdict = halving.close()
    assert (verdict.rung, verdict.go_on, verdict.dropped) == (1, ("b", "c"), ("d",))
    assert not halving.waits("c", 5)
    halving.arrive("c", 10, 0.4)
    verdict = halving.close()
    assert verdict.dropped == ("b",)
    assert halving.ranking({"b": 0.5, "c": 0.4, "d": 2.0}) == ["c", "b", "d", "a"]


def test_without_rungs_nobody_waits():
    halving = Halving(["a", "b"], None, 20)
    assert not [step for step in range(21) if halving.rung_at(step) or halving.waits("a", step)]
    assert halving.close() is None
    halving.end("a", 2.0)
    assert not halving.over
    halving.end("b", 1.0)
    assert halving.over
    assert halving.ranking({"a": 2.0, "b": 1.0}) == ["b", "a"]


@pytest.mark.parametrize(("steps", "rungs"), [(20, [5, 10, 15]), (21, [5, 10, 15, 20]), (6, [5])])
def test_no_rung_is_behind_the_last_step(steps, rungs):
    halving = Halving(["a"], 5, steps)
    assert [step for step in range(40) if halving.rung_at(step)] == rungs
