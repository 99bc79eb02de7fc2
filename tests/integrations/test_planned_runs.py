"""What planned loops leave behind: steps, loops left alone, refusals, and the record and the end of a check."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from evenload.api import load_plugins
from evenload.commands.run import planned_steps
from evenload.core.errors import EvenloadError, RankError
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.exercised import Exercised
from evenload.core.planning.gains import gains
from evenload.core.planning.notes import LEFT_OUT
from evenload.core.recipe.carried import carried
from evenload.core.recipe.recipe import parse
from evenload.integrations.unmodified import planned_runs
from evenload.integrations.unmodified.planned_loop import GlobalBatch
from evenload.integrations.unmodified.run_folder import VARIABLE, Idle, RunFolder
from evenload.runtime.experts.gate import Load

load_plugins()
LENGTHS = [900, 100, 100, 100, 100, 100, 100, 500]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> RunFolder:
    """A folder of a run that this process belongs to, in which it has said nothing yet."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(planned_runs, "_steps", Counter())
    monkeypatch.setattr(planned_runs, "_exercised", Exercised())
    monkeypatch.setattr(planned_runs, "_idle", set())
    return RunFolder(tmp_path)


def chain(**plugins: dict) -> PlanChain:
    recipe = parse({"plugins": {name: {"enabled": True, **keys} for name, keys in plugins.items()}})
    return PlanChain.of_recipe(recipe, recipe.layout(2))


def report(loop: str = "Megatron-Core") -> None:
    planned = chain(packing={"max_tokens": 1000})
    planned_runs.report_step(loop, planned, planned.plan(as_lengths(LENGTHS)), micro_batch_size=2)


def test_steps_of_a_process_are_counted_by_loop(folder):
    assert (folder.steps, folder.plugins, folder.started) == ({}, {}, 0)
    report()
    report()
    report("DeepSpeed")
    assert folder.steps == {"Megatron-Core": 2, "DeepSpeed": 1}
    assert folder.plugins == {"packing": ""}
    assert folder.record("check") is None, "no record outside check mode"


def test_the_first_step_says_what_is_planned_and_how_to_turn_it_off(folder, capfd, monkeypatch):
    monkeypatch.setenv("PYTHON_EVENLOAD", carried(parse({"costs": "cpu"})))
    report()
    report()
    (said,) = capfd.readouterr().err.splitlines()
    planned = chain(packing={"max_tokens": 1000})
    plan, stock = planned.plan(as_lengths(LENGTHS)), replace(planned, micro_batch_size=2).stock(as_lengths(LENGTHS))
    assert f"with packing: {plan.num_padded_tokens:,} tokens instead of {stock.num_padded_tokens:,}" in said
    assert "(costs=cpu, cluster=local). To turn evenload off, run the command without it." in said


def test_ranks_of_a_job_count_once_and_jobs_of_a_command_add_up(folder, monkeypatch):
    for pid, rank, steps in ((1, 0, 5), (2, 1, 5), (3, 0, 7), (4, 1, 6)):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        folder.write_steps(
            rank, {"DeepSpeed": steps}, {"packing": "", "moe": "no copies", "mesh": "no sharing" * (pid < 4)}
        )
    assert folder.steps == {"DeepSpeed": 12}
    assert planned_steps(folder) == "12 steps of DeepSpeed with packing, moe (no copies), mesh"


def test_plugins_without_effect_are_told_of_planners_of_layers_where_loads_are_known(folder):
    planned = chain(packing={"max_tokens": 1000}, mesh={"max_tokens": 1000, "max_degree": 1})
    plan = planned.plan(as_lengths(LENGTHS))
    planned_runs.report_step("Megatron-Core", planned, plan)
    assert folder.plugins == {"packing": "", "mesh": "no shared micro-batches"}
    divided = {"parallel": {"ep": 2}, "model": {"family": "mixtral", "moe": {"num_experts": 4}}}
    recipe = parse({**divided, "plugins": {"moe": {"enabled": True}}})
    planned = PlanChain.of_recipe(recipe, recipe.layout(2))
    for copies in (0, 2):
        loads = [Load(0, 0, (1, 1), 1.5, 1.0, copies)]
        planned_runs.report_step("Megatron-Core", planned, planned.plan(as_lengths(LENGTHS)), loads=loads)
        assert folder.plugins["moe"] == ("" if copies else "no copies of experts or tokens once to a node")


def test_outside_a_run_a_report_writes_nothing(folder, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    report()
    planned_runs.report_idle("DeepSpeed", "why", "do")
    monkeypatch.setenv(VARIABLE, str(folder.path / "on another machine"))
    report()
    assert not list(folder.path.iterdir())


def test_a_loop_left_alone_is_told_of_once(folder, caplog):
    with caplog.at_level(logging.WARNING, "evenload"):
        planned_runs.report_idle("DeepSpeed", "no training_data", "give it")
        planned_runs.report_idle("DeepSpeed", "no training_data", "give it")
    assert folder.idle == [Idle("DeepSpeed", "no training_data", "give it")]
    assert [record.getMessage() for record in caplog.records] == [
        "nothing is planned in DeepSpeed: no training_data; give it"
    ]


def test_a_refusal_is_printed_once_for_the_machine(folder, capfd):
    error, other = EvenloadError("a batch is odd", "9", "even it"), EvenloadError("a batch is odd", "7", "even it")
    for one in (error, error, other):
        planned_runs.report_refusal(one)
    assert capfd.readouterr().err == f"evenload: {error}\nevenload: {other}\n"
    assert [str(one) for one in folder.refusals] == [str(error), str(other)]


def test_the_record_of_a_check_holds_the_first_step(folder, monkeypatch):
    monkeypatch.setenv(planned_runs.CHECK, "1")
    report()
    record = folder.record("check")
    report("DeepSpeed")
    assert folder.record("check") == record
    assert (record["loop"], record["samples"], record["lengths"], record["ranks"]) == ("Megatron-Core", 8, LENGTHS, 2)
    assert record["tokens"] == sum(LENGTHS)
    # Micro-batches of two samples in order, each padded to its longer one: 800 + 0 + 0 + 400.
    assert (record["stock_padded_tokens"], record["padded_tokens"]) == (1200, 0)
    assert record["gain"] == record["stock_step_s"] / record["step_s"] > 1
    assert record["plugins"] == [{"name": "packing", "refused": None, "gain": record["gain"]}]


def test_rows_that_a_script_has_packed_are_compared_with_packed_rows(folder, monkeypatch, capfd):
    """Four rows of two samples each on two ranks: nothing of them is padding."""
    one = chain(packing={"max_tokens": 1800})
    batch = GlobalBatch.of([[[n, n] for n in LENGTHS[:2]], [[n, n] for n in LENGTHS[2:4]]], [[(), ()], [(), ()]], 0)
    plan, packed = one.plan(batch.lengths), batch.packed(one.limits)
    assert [sum(piece.length for piece in row.slices) for row in packed.micro_batches] == [
        2 * LENGTHS[place] for place in (0, 2, 1, 3)
    ]
    planned_runs.report_step("Transformers' Trainer", one, plan, packed=packed)
    assert "in rows that are packed already, predicted" in capfd.readouterr().err
    planned_runs._steps.clear()
    monkeypatch.setenv(planned_runs.CHECK, "1")
    planned_runs.report_step("Transformers' Trainer", one, plan, packed=packed)
    assert (folder.record("check")["packed"], folder.record("check")["stock_padded_tokens"]) == (True, 0)


def test_gains_of_plugins_multiply_to_that_of_the_plan():
    both = chain(packing={"max_tokens": 500}, mesh={"max_tokens": 500})
    told = gains(both, both.plan(as_lengths([100] * 9 + [400, 300])))
    product = 1.0
    for row in told["plugins"]:
        product *= row["gain"]
    assert [row["name"] for row in told["plugins"]] == ["packing", "mesh"]
    assert product == pytest.approx(told["gain"], rel=1e-12)


def test_a_plugin_that_leaves_the_batch_to_another_is_refused():
    both = chain(packing={"max_tokens": 500, "slices": "off"}, mesh={"max_tokens": 500})
    plan = both.plan(as_lengths(LENGTHS))
    assert any(note.startswith(f"{LEFT_OUT}packing") for note in plan.notes), "the batch is no example"
    rows = {row["name"]: row for row in gains(both, plan)["plugins"]}
    assert "900" in rows["packing"]["refused"]
    assert rows["packing"]["gain"] is None
    assert rows["mesh"]["refused"] is None
    assert rows["mesh"]["gain"] > 0


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python that does all that scripts do at their end, unless it is ended before."""
    import os

    head = "import atexit, evenload.integrations.unmodified.planned_runs as p; from evenload.core.errors import *\n"
    words = [sys.executable, "-c", head + "atexit.register(print, 'at exit')\n" + code]
    return subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_a_check_ends_before_the_update_and_nothing_else_does():
    code = "try: p.end_of_check(); print('updated')\nfinally: print('saved')\n"
    assert run(code).stdout.split("\n")[:2] == ["updated", "saved"]
    ended = run("print('before')\n" + code, PYTHON_EVENLOAD_CHECK="1")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "before\n", "")


@pytest.mark.slow
def test_a_check_ends_before_any_optimizer_of_torch_updates(tmp_path):
    code = (
        "p.watch_process()\nimport torch\n"
        "w = torch.nn.Parameter(torch.ones(1)); w.sum().backward(); torch.optim.AdamW([w]).step(); print('updated')\n"
    )
    environment = {VARIABLE: str(tmp_path), "PYTHON_EVENLOAD_CHECK": "1"}
    ended = run(code, **environment)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert "no loop that evenload knows" in RunFolder(tmp_path).idle[0].why


ERROR = "('odd', '9', 'even it')"


@pytest.mark.parametrize(("error", "code"), [("EvenloadError", 2), ("RankError", 1)])
def test_an_error_of_evenload_ends_a_process_with_its_message_alone(tmp_path, error, code):
    """Once: what another process has printed is not printed again."""
    for said in (f"evenload: {RankError('odd', '9', 'even it')}\n", ""):
        ended = run(f"p.watch_process()\nraise {error}{ERROR}", **{VARIABLE: str(tmp_path)})
        assert (ended.returncode, ended.stdout, ended.stderr) == (code, "at exit\n", said)


def test_an_error_of_anybody_else_ends_a_process_as_ever(tmp_path):
    other = run("p.watch_process()\n1 / 0", **{VARIABLE: str(tmp_path)})
    assert other.returncode == 1
    assert "ZeroDivisionError" in other.stderr
