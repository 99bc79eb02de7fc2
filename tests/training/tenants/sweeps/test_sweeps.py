"""Jobs in which tenants are evaluated, stop, and are swept: nobody's training changes by it, and the best one stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

RECIPE = {
    "trainer": "megatron",
    "model": {"weights": "tiny-llama"},
    "parallel": {"dp": 1},
    "train": {"dtype": "fp64"},
    "plugins": {
        "packing": {"enabled": True, "max_tokens": 2048},
        "lora": {"enabled": True, "tenants": "tenants", "out": "out"},
    },
}
EVALUATE: dict[str, Any] = {"source": "python-docstrings-held-out/email", "every": 2, "batches": 2}
ACME: dict[str, Any] = {
    "data": {"source": "python-docstrings/email", "max_length": 128, "long_samples": "truncate"},
    "adapter": {"r": 4, "lora_dropout": 0.1},
    "train": {"steps": 8, "batch_size": 3, "lr": 1e-2, "weight_decay": 0.1},
}
BOLT: dict[str, Any] = {
    "data": {"source": "python-docstrings/asyncio", "max_length": 96, "long_samples": "truncate"},
    "adapter": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "train": {"steps": 7, "batch_size": 2, "lr": 1e-3},
}
HOPELESS: dict[str, Any] = {
    **ACME,
    "train": {"steps": 40, "batch_size": 3, "lr": 0.5, "warmup_steps": 100},
    "evaluate": {**EVALUATE, "patience": 2},
}
"""Its rate grows until its loss does."""
RATES = [1e-3, 3e-2, 1e-2, 1e-4]
SWEPT = {
    **ACME,
    "evaluate": EVALUATE,
    "adapter": {"r": 4},
    "sweep": {"train.lr": RATES, "halve_every": 2},
}
TRIALS = [f"acme.lr={rate}" for rate in RATES]


class Place:
    """A folder in which a job runs."""

    def __init__(self, path: Path, forged: Callable[..., Any]) -> None:
        self.path, self.out, self._forged = path, path / "out", forged
        (path / "tenants").mkdir(parents=True)
        (path / "r.yaml").write_text(yaml.safe_dump(RECIPE))

    def run(self, *words: str, planted: str = "", **tenants: dict[str, Any]) -> Any:
        for name, tenant in tenants.items():
            (self.path / "tenants" / f"{name}.yaml").write_text(yaml.safe_dump(tenant))
        return self._forged(self.path, "train", "r.yaml", *words, "--json", planted=planted)

    def trained(self, *words: str, planted: str = "", **tenants: dict[str, Any]) -> dict[str, Any]:
        done = self.run(*words, planted=planted, **tenants)
        assert done.returncode == 0, done.stderr[-3000:]
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def rows(self, name: str, *, evaluations: bool = False) -> list[dict[str, Any]]:
        """Of the steps of a tenant, or of its evaluations, without seconds."""
        lines = map(json.loads, (self.out / name / "metrics.jsonl").read_text().splitlines())
        rows = [
            row.get("evaluation", row) | {"step": row["step"]} for row in lines if ("evaluation" in row) == evaluations
        ]
        return [{key: value for key, value in row.items() if key not in ("seconds", "step_s")} for row in rows]

    def adapter(self, *folder: str) -> dict[str, torch.Tensor]:
        return load_file(self.out.joinpath(*folder) / "adapter_model.safetensors")


Places = Callable[[str], Place]


@pytest.fixture
def place(tmp_path: Path, forged: Callable[..., Any]) -> Places:
    return lambda name: Place(tmp_path / name, forged)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, forged: Callable[..., Any]) -> tuple[Place, dict[str, Any]]:
    """A sweep of four, with a neighbour, and what it came to."""
    place = Place(tmp_path_factory.mktemp("swept") / "job", forged)
    return place, place.trained(acme=SWEPT, bolt=BOLT)


def states(result: dict[str, Any]) -> dict[str, tuple[str, int]]:
    return {tenant["name"]: (tenant["state"], tenant["step"]) for tenant in result["tenants"]}


def refuse_unlike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Adapters are the same to the rounding of float64; other packs sum in another order."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-12)


def test_evaluations_change_no_bit_of_training(place: Places) -> None:
    without, evaluated = place("without"), place("evaluated")
    without.trained(acme=ACME, bolt=BOLT)
    scored = {"acme": {**ACME, "evaluate": EVALUATE}, "bolt": {**BOLT, "evaluate": {**EVALUATE, "every": 3}}}
    evaluated.trained("log.jsonl=log.jsonl", **scored)
    for name in ("acme", "bolt"):
        assert evaluated.rows(name) == without.rows(name)
    series = {name: evaluated.rows(name, evaluations=True) for name in ("acme", "bolt")}
    assert [row["step"] for row in series["acme"]] == [0, 2, 4, 6, 8]
    assert [row["step"] for row in series["bolt"]] == [0, 3, 6, 7]
    assert not without.rows("acme", evaluations=True)
    lines = [json.loads(line) for line in (evaluated.path / "log.jsonl").read_text().splitlines()]
    logged = [row["evaluation"]["loss"] for row in lines if row.get("tenant") == "bolt"]
    assert logged == [row["loss"] for row in series["bolt"]]
    assert series["acme"][0]["loss"] != series["bolt"][0]["loss"], "each has samples of its own batch size"
    best = min(series["acme"], key=lambda row: row["loss"])
    assert [row["best"] for row in series["acme"]][series["acme"].index(best)]
    status = json.loads((evaluated.out / "acme" / "status.json").read_text())
    assert (status["best"], status["best_step"]) == (best["loss"], best["step"])


def test_patience_stops_a_tenant_and_keeps_its_best(place: Places) -> None:
    job, alone = place("job"), place("alone")
    result = job.trained(hopeless=HOPELESS, bolt=BOLT)
    evaluations = job.rows("hopeless", evaluations=True)
    losses = [row["loss"] for row in evaluations]
    best = losses.index(min(losses))
    assert 0 < best == len(losses) - 3, "the test means a tenant that gains first and loses then"
    assert states(result) == {"bolt": ("done", 7), "hopeless": ("stopped", 2 * (best + 2))}
    assert len(job.rows("hopeless")) == 2 * (best + 2)
    shorter = {**HOPELESS, "train": {**HOPELESS["train"], "steps": 2 * best}, "evaluate": None}
    alone.trained(hopeless=shorter)
    refuse_unlike(job.adapter("hopeless", "best"), alone.adapter("hopeless", "last"))
    with pytest.raises(AssertionError):
        refuse_unlike(job.adapter("hopeless", "best"), job.adapter("hopeless", "last"))


def test_a_sweep_halves_to_one_winner_that_is_what_it_would_be_alone(
    place: Places, swept: tuple[Place, dict[str, Any]]
) -> None:
    job, result = swept
    (ranking,) = result["sweeps"]
    assert ranking == json.loads((job.out / "acme" / "ranking.json").read_text())
    names = [row["trial"] for row in ranking["trials"]]
    assert sorted(names) == sorted(TRIALS)
    assert [row["step"] for row in ranking["trials"]] == [8, 4, 2, 2]
    assert [row["state"] for row in ranking["trials"]] == ["done", "dropped", "dropped", "dropped"]
    winner = ranking["winner"]
    assert winner == names[0]
    first_rung = {name: min(row["loss"] for row in job.rows(name, evaluations=True)[:2]) for name in TRIALS}
    assert set(names[:2]) == set(sorted(TRIALS, key=first_rung.__getitem__)[:2])
    assert states(result)["bolt"] == ("done", 7)

    alone = place("alone")
    (values,) = (row["values"] for row in ranking["trials"][:1])
    tenant = {key: value for key, value in SWEPT.items() if key != "sweep"}
    alone.trained(acme={**tenant, "train": {**SWEPT["train"], "lr": values["train.lr"]}})
    refuse_unlike(job.adapter(winner, "last"), alone.adapter("acme", "last"))
    refuse_unlike(job.adapter("acme", "best"), alone.adapter("acme", "best"))


ONE_AT_A_TIME = """
from evenload.training.tenants.admission import members
_missing = members.Members._missing_bytes
def missing(self, tenant, *, beside=True):
    others = [one for one in self._job.host.adapters.numbers] if beside else []
    _missing(self, tenant, beside=beside)
    return 1e6 if others else 0.0
members.Members._missing_bytes = missing
"""


def test_trials_that_do_not_fit_at_once_take_turns_and_the_same_one_wins(
    place: Places, swept: tuple[Place, dict[str, Any]]
) -> None:
    job = place("job")
    (ranking,) = job.trained(acme=SWEPT, planted=ONE_AT_A_TIME)["sweeps"]
    (expected,) = swept[1]["sweeps"]
    rows, wanted = (one["trials"] for one in (ranking, expected))
    assert [(row["trial"], row["state"], row["step"]) for row in rows] == [
        (row["trial"], row["state"], row["step"]) for row in wanted
    ]
    refuse_unlike(job.adapter("acme", "best"), swept[0].adapter("acme", "best"))
    assert [row["step"] for row in job.rows(ranking["winner"])] == list(range(8))


KILLED = """
import os, signal
from evenload.training.tenants import loop
_train = loop.TenantLoop._train
def train(self, planned):
    if self.step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    _train(self, planned)
loop.TenantLoop._train = train
"""


@pytest.mark.parametrize("checkpoint", ["checkpoint.dir=checkpoints", "checkpoint.dir=null"])
def test_a_sweep_that_is_killed_between_rungs_comes_to_the_same_end(
    checkpoint: str, place: Places, swept: tuple[Place, dict[str, Any]]
) -> None:
    """With a checkpoint behind step 2, at the first rung; and without, where those who were not dropped begin anew."""
    job = place("job")
    assert job.run(checkpoint, "checkpoint.every=2", acme=SWEPT, planted=KILLED).returncode != 0
    result = job.trained(checkpoint, "checkpoint.every=2")
    (ranking,) = result["sweeps"]
    (expected,) = swept[1]["sweeps"]
    keys = ("trial", "state", "step")
    assert [[row[key] for key in keys] for row in ranking["trials"]] == [
        [row[key] for key in keys] for row in expected["trials"]
    ]
    refuse_unlike(job.adapter("acme", "best"), swept[0].adapter("acme", "best"))
    assert result["summary"]["steps"] == (6 if "checkpoints" in checkpoint else 8)


GONE = """
from pathlib import Path
from evenload.training.tenants import loop
_train = loop.TenantLoop._train
def train(self, planned):
    if self.step == 3 and self._job.leads:
        Path("held_out.jsonl").write_text("gone")
    _train(self, planned)
loop.TenantLoop._train = train
"""


def test_held_out_samples_that_change_end_their_tenant_and_nobody_else(place: Places) -> None:
    job, alone = place("job"), place("alone")
    rows = [{"input_ids": [(7 * i + k) % 250 for k in range(20 + i)]} for i in range(9)]
    (job.path / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    acme = {**ACME, "evaluate": {"source": "held_out.jsonl", "every": 2}}
    result = job.trained(acme=acme, bolt={**BOLT, "evaluate": EVALUATE}, planted=GONE)
    assert states(result) == {"acme": ("failed", 4), "bolt": ("done", 7)}
    (reason,) = (tenant["reason"] for tenant in result["tenants"] if tenant["name"] == "acme")
    assert "held_out.jsonl" in reason
    alone.trained(bolt=BOLT)
    refuse_unlike(job.adapter("bolt", "last"), alone.adapter("bolt", "last"))


def test_a_bad_sweep_concerns_nobody_else(place: Places) -> None:
    job = place("job")
    wrong = {**SWEPT, "sweep": {"train.rate": [1, 2]}}
    taken = {**SWEPT, "sweep": {"train.lr": [1e-3]}}
    result = job.trained(**{"acme": wrong, "bolt": BOLT, "core": taken, "core.lr=0.001": BOLT})
    assert len(result["refused"]) == 2
    folder = job.path / "tenants"
    assert "did you mean" in (folder / "acme.error").read_text()
    (errors,) = (path.read_text() for path in folder.glob("core*.error"))
    assert "two tenants are called core.lr=0.001" in errors
    assert states(result)["bolt"] == ("done", 7)
