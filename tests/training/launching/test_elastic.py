"""Replicas that are lost and come again: no step is lost, done twice, or done with another sum."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.machine.replicas import RosterMember
from evenload.core.recipe.recipe import parse
from evenload.runtime.world.roster import Standing, settler_of
from evenload.training.launching import processes
from evenload.training.launching.elastic import Roll, launch_replicas
from evenload.training.launching.replica_choice import Elastic
from evenload.training.progress import silent
from harness.cases import only_full

RANK = Path(__file__).with_name("replica_rank.py")
ALL_HERE = Elastic(holds=True, replica=None, meet="")


@pytest.fixture
def job(monkeypatch):
    """Trains a model of four numbers on replicas of 2 and 1 ranks, with these faults."""
    real = processes.subprocess.Popen
    popen = SimpleNamespace(Popen=lambda command, **how: real([sys.executable, str(RANK)], **how), DEVNULL=-3)
    monkeypatch.setattr(processes, "subprocess", popen)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(faults, sizes=(2, 1)):
        monkeypatch.setenv("FAULTS", json.dumps(faults))
        recipe = SimpleNamespace(
            ranks_of_replicas=sizes,
            safety=SimpleNamespace(gone_s=2.0),
            parallel=SimpleNamespace(replicas=[None] * len(sizes)),
        )
        return launch_replicas([], recipe, ALL_HERE, silent)

    return run


K, S = signal.SIGKILL, signal.SIGSTOP


@pytest.fixture
def undisturbed():
    import torch

    weights = torch.zeros(4, dtype=torch.float64)
    for step in range(30):
        gradient = sum(torch.sin(weights + sample + step) for sample in range(12))
        weights += gradient / gradient.norm() * 0.1
    return weights.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({"1/1/0/3/passes": K, "0/1/0/12/committed": S}, id="one killed, the first stopped in its update"),
        *(
            only_full({f"{replica}/1/{rank}/7/{where}": fault}, id=f"{where} {replica} {rank} {fault}")
            for where in ("passes", "summed", "committed", "told")
            for replica, rank in ((0, 0), (0, 1), (1, 0))
            for fault in (K, S)
        ),
    ],
)
def test_each_step_is_done_once_and_by_whoever_is_there(job, undisturbed, faults, caplog):
    result = job(faults)
    assert result["weights"] == pytest.approx(undisturbed, rel=1e-12, abs=0)
    assert len(result["ranks"]) == 30
    assert result["ranks"][-1] == 3  # all are there again
    said = caplog.text
    assert said.count("is lost after step") == len(faults), said
    assert "go on after step" in said


def member(number, life=1):
    return RosterMember(number, life, 2, {"dp": 2})


def test_a_roll_has_who_arrived_without_who_is_lost():
    roll = Roll()
    assert not roll.arrives(member(0), {"recipe": "a"})
    assert not roll.arrives(member(1), {"recipe": "a"})
    assert [one.number for one in roll.next().members] == [0, 1]
    assert "takes part in the job already" in str(roll.arrives(member(1, 2), {"recipe": "a"}))
    assert roll.lose(1, 1)
    assert not roll.arrives(member(2), {"recipe": "a"})
    roster = roll.next([(1, 1)])
    assert (roster.number, [one.number for one in roster.members]) == (2, [0, 2])
    assert roster.place_of(2, 1) == 1
    assert roster.place_of(1, 1) is None
    assert not roll.lose(1, 2)


def test_a_replica_that_trains_something_else_is_refused():
    roll = Roll()
    assert not roll.arrives(member(0), {"data": "a", "version": "1"})
    refusal = roll.arrives(member(1), {"data": "b", "version": "1"})
    assert "something else than the job" in refusal.what
    assert "data b, not a" in refusal.found
    assert not roll.ready.get(1)


def recipe_of(*replicas):
    lora = {"plugins": {"lora": {"enabled": True}}}
    return parse(lora | ({"parallel": {"replicas": list(replicas)}} if replicas else {}))


REFUSED = {
    "one replica": (Elastic(True, None, ""), recipe_of({"dp": 1}), None, (), "where there are several"),
    "no replicas": (Elastic(True, None, ""), recipe_of(), None, (), "where there are several"),
    "no place": (Elastic(False, 1, ""), recipe_of({}, {}), None, (), "by its number and their meeting place"),
    "no number": (Elastic(False, None, "a:1"), recipe_of({}, {}), None, (), "by its number and their meeting place"),
    "no such replica": (Elastic(False, 2, "a:1"), recipe_of({}, {}), None, (), "there is no such replica"),
    "no port": (Elastic(False, 1, "a"), recipe_of({}, {}), None, (), "no place where replicas meet"),
    "baselines": (Elastic(True, None, ""), recipe_of({}, {}), None, ("stock",), "baselines do not train next to"),
    "ranks": (Elastic(True, None, ""), recipe_of({}, {}), 3, (), "say how many ranks they have"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_come_and_go_is_refused_before_a_rank_starts(name):
    asked, recipe, num_ranks, against, message = REFUSED[name]
    with pytest.raises(EvenloadError, match=message):
        asked.refuse(recipe, num_ranks, against)


def test_a_rank_of_torchrun_joins_by_its_number_and_place():
    recipe, environment = recipe_of({}, {}), {}
    Elastic(False, 1, "node0:29400").name(environment, recipe)
    assert environment == {"EVENLOAD_MEET": "node0:29400", "EVENLOAD_REPLICA": "1"}
    with pytest.raises(EvenloadError, match="this one is a rank already"):
        Elastic(True, None, "").name({}, recipe)


def test_a_step_is_settled_where_all_who_are_left_have_its_sums_or_any_has_updated():
    has_sums, has_none, ahead, new = Standing(4, True, 2.0), Standing(4), Standing(5, False, 3.0), Standing(-1)
    assert settler_of(4, [new, has_sums, has_sums]).value == 2.0
    assert settler_of(4, [has_sums, ahead]).value == 3.0  # by the norm that the update was clipped with
    assert settler_of(4, [has_sums, has_none, new]) is None


PLANT = """
import os, signal, sys
if os.environ.get("EVENLOAD_REPLICA") == "{replica}" and os.environ.get("EVENLOAD_LIFE") == "1":
    from evenload.runtime.watchdog.watchdog import Watchdog
    at = Watchdog.at
    def dies(self, where, step=None, waits=False):
        at(self, where, step, waits)
        if where.startswith("{where}") and step == 3 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    Watchdog.at = dies
"""
RECIPE = {
    "trainer": "megatron",
    "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64},
    "data": {"source": "python-docstrings/email", "max_length": 128},
    "train": {"steps": 24, "global_batch_size": 6, "dtype": "fp64", "lr": 1e-3},
    "parallel": {"replicas": [{"dp": 1}, {"dp": 1}]},
    "log": {"jsonl": "log.jsonl"},
}
SLOWLY = """
import time
from evenload.training import eras
settled = eras.settled
def slowly(step):
    from evenload.runtime.world.replicas import job_group
    time.sleep(0.0 if len(job_group().sizes) > 1 else 0.5)
    settled(step)
eras.settled = slowly
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replica", "where"), [(0, "comparing times"), only_full(1, "update"), only_full(0, "forward and backward")]
)
def test_a_model_trains_on_as_undisturbed_while_a_replica_is_lost_and_comes_back(tmp_path, replica, where):
    """The first replica, which writes the log, is killed after it has updated its weights and before it says so."""
    whole = RECIPE | {"parallel": {"dp": 1}}
    logs = []
    for name, recipe, words in (("one", whole, ()), ("several", RECIPE, ("--elastic",))):
        folder, plants = tmp_path / name, tmp_path / "plants"
        folder.mkdir()
        plants.mkdir(exist_ok=True)
        (folder / "r.yaml").write_text(json.dumps(recipe))
        (plants / "sitecustomize.py").write_text(PLANT.format(replica=replica, where=where) + SLOWLY)
        paths = os.pathsep.join([str(plants), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"} if words else dict(os.environ)
        command = [sys.executable, "-m", "evenload", "train", "r.yaml", *words, "--json"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        logs.append([json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()])
    assert f"replica {replica} is lost after step" in done.stderr
    reference, own = logs
    assert [row["step"] for row in own] == list(range(24))
    assert [row["samples"] for row in own] == [row["samples"] for row in reference]
    assert [row["loss"] for row in own] == pytest.approx([row["loss"] for row in reference], rel=1e-9, abs=0)
    there = [len(row.get("replicas", ())) for row in own]
    assert min(there) < 2
    assert there[-1] == 2, there
