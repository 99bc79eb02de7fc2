"""Garbage is collected behind steps, and by nobody inside one."""

import gc

import pytest
from evenload.api import load_recipe
from evenload.training.garbage import collected
from evenload.training.job import Job

pytestmark = pytest.mark.slow
"""In a process of so many tests a collection takes a second."""


class Knot:
    """Held by itself alone."""

    alive = 0

    def __init__(self):
        self.itself = self
        Knot.alive += 1

    def __del__(self):
        Knot.alive -= 1


@pytest.fixture(autouse=True)
def as_it_was():
    gc.collect()
    Knot.alive = 0
    frozen = gc.get_freeze_count()  # pytest's own cases, until a run has ended
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen


def test_garbage_goes_behind_the_steps_that_were_asked_for_and_not_before():
    left = []
    with collected(3) as collect:
        for done in range(1, 8):
            Knot()
            [[] for _ in range(30_000)]  # more than the threshold of pytest, see conftest.py
            collect(done)
            left.append(Knot.alive)
    assert left == [1, 2, 0, 1, 2, 0, 1]


def test_without_the_setting_python_collects_as_ever():
    with collected(None) as collect:
        assert gc.isenabled()
        Knot()
        collect(1)
        assert Knot.alive == 1
        kept = [[] for _ in range(100_000)]
        assert Knot.alive == 0
        del kept


def test_garbage_that_was_there_before_the_first_step_is_not_kept_for_good():
    Knot()
    with collected(10):
        assert Knot.alive == 0


def test_a_step_that_fails_leaves_python_as_it_was():
    with pytest.raises(ZeroDivisionError), collected(2):
        raise ZeroDivisionError


def test_what_collects_nothing_at_once_says_so(caplog):
    recipe = load_recipe("quickstart", ["train.gc_every=10"])
    chain = type("Chain", (), {"links": True, "of_layers": True})()
    Job(recipe, None, None, chain, None, None).say_unused("bench")
    assert "train.gc_every has no effect in bench" in caplog.text
