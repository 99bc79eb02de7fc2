"""Loads of ranks and stages as one table of counts."""

import logging
import os
from types import SimpleNamespace

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import load
from evenload.data.expert_loads import read_loads
from evenload.runtime.experts.gate import Load
from evenload.training import expert_loads
from evenload.training.expert_loads import counts_of, imbalance_of, loads_writer, metrics_of, say_without_copies


def test_counts_stand_by_round_layer_rank_and_expert():
    rows = [
        (0, [Load(0, 1, (3, 1), 1.0, 1.0), Load(2, 1, (0, 2), 1.0, 1.0)]),
        (1, [Load(0, 1, (5, 0), 1.0, 1.0), Load(3, 1, (1, 1), 1.0, 1.0)]),
        (0, [Load(1, 3, (2, 2), 1.0, 1.0), Load(4, 3, (1, 0), 1.0, 1.0)]),  # the next pipeline stage
        (1, [Load(1, 3, (0, 4), 1.0, 1.0)]),
    ]
    counts, layers = counts_of(rows, 2)
    assert layers == [1, 3]
    assert counts.tolist() == [[[[3, 1], [5, 0]], [[2, 2], [0, 4]]], [[[0, 2], [1, 1]], [[1, 0], [0, 0]]]]


def test_metrics_are_of_all_ranks_layers_and_passes(monkeypatch):
    ranks = [
        [Load(0, 0, (1, 1), 1.5, 1.0, 2, 100, 0.25), Load(0, 1, (1, 1), 2.0, 1.25)],
        [Load(0, 0, (1, 1), 1.5, 1.0, 2, 300, 0.5), Load(0, 1, (1, 1), 2.0, 1.25, 0, 0, 0.125, "as 'clone' failed")],
        [],  # a rank whose stage has no experts
    ]

    def gathered(own):
        rows = [np.array([[*load[3:-1], bool(load.failed)] for load in loads], dtype=float) for loads in ranks]
        assert own.tolist() == rows[0].tolist()
        return [own, *rows[1:]]

    monkeypatch.setattr(expert_loads, "everyone", gathered)
    assert metrics_of(SimpleNamespace(expert_loads=ranks[0])) == {
        "imbalance_p50": 1.75,
        "imbalance_p95": 2.0,
        "imbalance_max": 2.0,
        "imbalance_after_p50": 1.125,
        "imbalance_after_p95": 1.25,
        "imbalance_after_max": 1.25,
        "copies": 1.0,
        "copied_bytes": 400.0,
        "exposed_s": 0.625,
        "failed_frac": 0.25,
    }
    monkeypatch.setattr(expert_loads, "everyone", lambda own: [own, own])
    assert imbalance_of(SimpleNamespace(expert_loads=ranks[0])) == 1.125
    longer = [Load(0, 0, (3, 3), 1.5, 1.5), Load(0, 1, (1, 1), 2.0, 1.1)]
    assert imbalance_of(SimpleNamespace(expert_loads=longer)) == pytest.approx(1.4)
    assert imbalance_of(SimpleNamespace(expert_loads=())) == 1.0
    assert metrics_of(SimpleNamespace(expert_loads=())) is None


@pytest.mark.parametrize(
    ("changes", "copies", "warned"),
    [
        ({}, (0.0, 0.0), True),
        ({}, (0.0, 0.5), False),
        ({"plugins.moe.enabled": False}, (0.0, 0.0), False),
        ({"parallel.ep": 1}, (0.0, 0.0), False),
        ({}, (), False),
    ],
)
def test_a_run_without_a_copy_says_so(caplog, changes, copies, warned):
    recipe = load("moe", ["plugins.moe.enabled=true"]).changed(changes)
    steps = [{"copies": each, "imbalance_p95": 1.125, "failed_frac": 0.0} for each in copies]
    say_without_copies(PlanChain.of_recipe(recipe, recipe.layout()), [None, *steps])
    assert len(caplog.records) == warned
    if warned:
        assert "plugins.moe changed nothing: in 2 steps no layer had a copy" in caplog.text
        assert "1.125 times the mean rank's tokens" in caplog.text


def test_a_run_whose_planner_of_layers_failed_says_so(caplog):
    recipe = load("moe", ["plugins.moe.enabled=true"])
    steps = [{"copies": 1.0, "imbalance_p95": 1.125, "failed_frac": each} for each in (0.0, 0.25)]
    say_without_copies(PlanChain.of_recipe(recipe, recipe.layout()), steps)
    assert "planners of layers failed in 12.5 % of all passes of layers" in caplog.text
    assert "changed nothing" not in caplog.text


def record(path, steps, *, goes_on, **changes):
    """What a run of one rank writes; each token count is the number of the step."""
    recipe = load("moe", ["model.num_layers=1", "model.moe.num_experts=2", f"log.loads={path}"]).changed(changes)
    host = SimpleNamespace(layout=recipe.layout(), dp_cp_rank=0)
    job = SimpleNamespace(recipe=recipe, has_experts=True, is_rank0=True, host=host)
    with loads_writer(job, goes_on=goes_on) as write:
        for step in steps:
            write(step, SimpleNamespace(expert_loads=(Load(0, 0, (step, step), 1.0, 1.0),)))


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(expert_loads, "everyone", lambda own: [own])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kept", [None, 0, 7, 120])
def test_a_run_that_goes_on_leaves_a_file_that_can_be_read(tmp_path, kept):
    """Also where its file ends inside a line, holds nothing, or is not there."""
    path = tmp_path / "logs" / "loads.jsonl"
    record(path, range(3), goes_on=False)
    if kept is None:
        path.unlink()
    else:
        assert path.stat().st_size > 150
        path.write_bytes(path.read_bytes()[:kept])
    record(path, range(2, 5), goes_on=True)
    steps = read_loads(path).steps
    assert {step: counts[0, 0, 0].tolist() for step, counts in steps.items()} == {
        step: [step, step] for step in ([0, 2, 3, 4] if kept == 120 else [2, 3, 4])
    }
    record(path, range(1), goes_on=False)
    assert list(read_loads(path).steps) == [0]


@pytest.mark.usefixtures("alone")
def test_a_run_on_another_layout_does_not_follow_in_the_same_file(tmp_path, caplog):
    path = tmp_path / "loads.jsonl"
    record(path, range(2), goes_on=False)
    before = path.read_bytes()
    record(path, range(2, 4), goes_on=True, **{"parallel.ep": 1})
    (warning,) = caplog.records
    assert "log.loads is given up, training goes on: its file was begun by another" in warning.getMessage()
    assert path.read_bytes() == before


@pytest.mark.usefixtures("alone")
def test_a_file_that_fails_is_given_up_and_one_that_cannot_be_opened_refused(tmp_path, caplog, monkeypatch):
    def full(path, goes_on):
        file = path.open("w+")
        file.flush = lambda: os.write(os.open("/dev/full", os.O_WRONLY), b"x")
        return file

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "evenload"):
        patched.setattr(expert_loads, "_opened", full)
        record(tmp_path / "loads.jsonl", range(3), goes_on=False)
    (warning,) = caplog.records
    assert "log.loads is given up, training goes on: step 0 is not in it" in warning.getMessage()
    with pytest.raises(EvenloadError, match=r"log.loads cannot be written"):
        record(tmp_path, range(3), goes_on=False)
