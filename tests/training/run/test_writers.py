"""Logs of a run: Weights & Biases where it is installed, and what a run comes to."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from evenload.commands.tables.train import _summary as table_of_train
from evenload.core.errors import EvenloadError
from evenload.core.recipe.recipe import parse
from evenload.training.metrics import StepRow, totals
from evenload.training.preflight import preflight
from evenload.training.run.writers import Entry, writer

RECIPE = parse({"log": {"wandb": "evenly"}})


def row(step, loss):
    numbers = {"grad_norm": 1.0, "lr": 0.1, "plan_s": 0.0, "plan_wait_s": 0.0, "imbalance": 1.0, "padding_frac": 0.0}
    seconds = 1.0 + 9.0 * (step == 0)
    return StepRow(
        step=step, loss=loss, tokens=100, targets=90, step_s=seconds, mfu=0.5 / seconds, bound_s=0.0, **numbers
    )


def test_without_the_package_the_recipe_is_refused_before_anything_starts(monkeypatch):
    with pytest.raises(EvenloadError, match=r"Weights & Biases is not installed") as caught:
        preflight(RECIPE)
    assert "pip install wandb" in caught.value.do
    monkeypatch.setattr("evenload.training.preflight.find_spec", lambda _: None)
    with pytest.raises(EvenloadError, match=r"TensorBoard is not installed") as caught:
        preflight(parse({"log": {"tensorboard": "board"}}))
    assert caught.value.do == "pip install tensorboard, or leave log.tensorboard out"


def test_who_is_not_logged_in_is_told_so(monkeypatch):
    def init(**_):
        raise RuntimeError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(EvenloadError, match=r"log.wandb cannot be opened") as caught, writer(RECIPE, is_rank0=True):
        pass
    assert caught.value.found == "RuntimeError: no API key"
    with writer(RECIPE, is_rank0=False):
        pass  # only the rank that leads opens logs


def entry(step):
    return Entry(step, {}, {"step": step, "run": "second"})


def logged(path, first, keeps=True):
    """What is in a log when a run has gone on with the step ``first`` and trained two."""
    recipe = parse({"log": {"jsonl": str(path)}, **({"checkpoint": {"dir": "kept"}} if keeps else {})})
    with writer(recipe, is_rank0=True, first=first) as write:
        for step in (first, first + 1):
            write(entry(step))
    return [json.loads(line) for line in path.read_text().splitlines()]


SCORED = {"validation": {"step": 4, "loss": 1.0}}
TENANT = {"tenant": "acme", "step": 90, "evaluation": {"loss": 1.0}}


@pytest.mark.parametrize("torn", ["", '{"step": 9, "lo', "[1]\n", "5\n", "\x00\x00\n", '{"a": 1}\n'])
def test_a_log_holds_each_step_once_when_a_killed_run_goes_on(tmp_path, torn):
    before = [*({"step": step} for step in range(4)), SCORED, TENANT]
    behind = [{"step": 4}, {"step": 5}, TENANT, {"validation": {"step": 6, "loss": 0.5}}]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*before, *behind]) + torn)
    second = [{"step": step, "run": "second"} for step in (4, 5)]
    assert logged(path, 4) == [*before, *second]
    assert logged(path, 6) == [*before, *second, *({"step": step, "run": "second"} for step in (6, 7))]
    path.write_text("")
    assert logged(path, 4) == second
    path.unlink()
    assert logged(path, 4) == second


def test_a_run_that_begins_anew_puts_the_log_of_the_last_one_aside(tmp_path):
    path = tmp_path / "log.jsonl"
    assert [row["step"] for row in logged(path, 0)] == [0, 1]
    assert [row["step"] for row in logged(path, 0)] == [0, 1]
    assert len((tmp_path / "log.jsonl.before").read_text().splitlines()) == 2
    assert [row["step"] for row in logged(path, 0, keeps=False)] == [0, 1, 0, 1], "nothing goes on from it"


def test_a_pipe_that_nobody_reads_is_refused(tmp_path):
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(EvenloadError, match=r"log\.jsonl cannot be written"):
        logged(tmp_path / "log.jsonl", 4)


def test_a_log_that_is_no_file_is_left_alone(tmp_path):
    link = tmp_path / "log.jsonl"
    link.symlink_to("/dev/null")
    assert logged(link, 0) == logged(link, 3) == []
    assert link.is_symlink()


def test_a_run_is_summed_up_with_the_rates_of_steps_after_the_first(shown):
    result = totals([row(0, 3.0), row(1, 1.5), row(2, 2.0)], Path("kept/step00000003"))
    assert (result["steps"], result["last_step"], result["tokens"], result["targets"]) == (3, 2, 300, 270)
    assert (result["train_s"], result["tokens_per_s"], result["mfu"]) == (12.0, 100.0, 0.5)
    assert (result["loss"], result["best_loss"], result["best_step"]) == (2.0, 1.5, 1)
    text = shown(table_of_train(result))
    assert all(part in text for part in ("300, 270", "0:00:12", "50.0 %", "2.0000, 1.5000 in step 1", "step00000003"))
    assert totals([], None)["best_loss"] is None
