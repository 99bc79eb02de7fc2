"""Jobs in which tenants are evaluated, stop, and are swept: nobody's training changes by it, and the best one stays."""

import json

import pytest
import torch
from harness.cases import only_full
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
FP64 = {"dtype": "fp64"}
EVALUATE = {"source": "python-docstrings-held-out/email", "every": 2, "batches": 2}
ACME = {
    "data": {"source": "python-docstrings/email", "max_length": 128, "long_samples": "truncate"},
    "adapter": {"r": 4, "lora_dropout": 0.1},
    "train": {"steps": 8, "batch_size": 3, "lr": 1e-2, "weight_decay": 0.1},
}
BOLT = {
    "data": {"source": "python-docstrings/asyncio", "max_length": 96, "long_samples": "truncate"},
    "adapter": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "train": {"steps": 7, "batch_size": 2, "lr": 1e-3},
}
HOPELESS = {
    **ACME,
    "train": {"steps": 40, "batch_size": 3, "lr": 0.5, "warmup_steps": 100},
    "evaluate": {**EVALUATE, "patience": 2},
}
"""Its rate grows until its loss does."""
RATES = [1e-3, 3e-2, 1e-2, 1e-4]
SWEPT = {**ACME, "evaluate": EVALUATE, "adapter": {"r": 4}, "sweep": {"train.lr": RATES, "halve_every": 2}}
TRIALS = [f"acme.lr={rate}" for rate in RATES]


@pytest.fixture
def new_job(tmp_path, job_of):
    """``new_job("name", acme={...})``: a job of these tenants in a folder of that name."""

    def new(name, **tenants):
        job = job_of(tmp_path / name, train=FP64)
        job.put(**tenants)
        return job

    return new


@pytest.fixture(scope="module")
def plain(tmp_path_factory, job_of):
    """Two tenants that nobody evaluates."""
    job = job_of(tmp_path_factory.mktemp("plain"), train=FP64)
    job.put(acme=ACME, bolt=BOLT)
    job.trained()
    return job


@pytest.fixture(scope="module")
def swept(tmp_path_factory, job_of):
    """A sweep of four, with a neighbour, and what it came to."""
    job = job_of(tmp_path_factory.mktemp("swept"), train=FP64)
    job.put(acme=SWEPT, bolt=BOLT)
    return job, job.trained()


def adapter(job, *folder):
    return load_file(job.out.joinpath(*folder) / "adapter_model.safetensors")


def ends_of(ranking):
    return [(row["trial"], row["state"], row["step"]) for row in ranking["trials"]]


def refuse_unlike(one, other):
    """Adapters are the same to the rounding of float64; other packs sum in another order."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-12)


def test_evaluations_change_no_bit_of_training(new_job, plain):
    scored = {"acme": {**ACME, "evaluate": EVALUATE}, "bolt": {**BOLT, "evaluate": {**EVALUATE, "every": 3}}}
    evaluated = new_job("evaluated", **scored)
    evaluated.trained("log.jsonl=log.jsonl")
    for name in ("acme", "bolt"):
        assert evaluated.rows(name) == plain.rows(name)
    series = {name: evaluated.rows(name, evaluations=True) for name in ("acme", "bolt")}
    assert [row["step"] for row in series["acme"]] == [0, 2, 4, 6, 8]
    assert [row["step"] for row in series["bolt"]] == [0, 3, 6, 7]
    assert not plain.rows("acme", evaluations=True)
    lines = [json.loads(line) for line in (evaluated.path / "log.jsonl").read_text().splitlines()]
    logged = [row["evaluation"]["loss"] for row in lines if row.get("tenant") == "bolt"]
    assert logged == [row["loss"] for row in series["bolt"]]
    assert series["acme"][0]["loss"] != series["bolt"][0]["loss"], "each has samples of its own batch size"
    best = min(series["acme"], key=lambda row: row["loss"])
    assert [row["best"] for row in series["acme"]][series["acme"].index(best)]
    status = json.loads((evaluated.out / "acme" / "status.json").read_text())
    assert (status["best"], status["best_step"]) == (best["loss"], best["step"])


def test_patience_stops_a_tenant_and_keeps_its_best(new_job):
    job = new_job("job", hopeless=HOPELESS, bolt=BOLT)
    result = job.trained()
    evaluations = job.rows("hopeless", evaluations=True)
    losses = [row["loss"] for row in evaluations]
    best = losses.index(min(losses))
    assert 0 < best == len(losses) - 3, "the test means a tenant that gains first and loses then"
    assert job.states(result) == {"bolt": ("done", 7), "hopeless": ("stopped", 2 * (best + 2))}
    assert len(job.rows("hopeless")) == 2 * (best + 2)
    shorter = {**HOPELESS, "train": {**HOPELESS["train"], "steps": 2 * best}, "evaluate": None}
    alone = new_job("alone", hopeless=shorter)
    alone.trained()
    refuse_unlike(adapter(job, "hopeless", "best"), adapter(alone, "hopeless", "last"))
    with pytest.raises(AssertionError):
        refuse_unlike(adapter(job, "hopeless", "best"), adapter(job, "hopeless", "last"))


def test_a_sweep_halves_to_one_winner_that_is_what_it_would_be_alone(new_job, swept):
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
    assert job.states(result)["bolt"] == ("done", 7)

    (values,) = (row["values"] for row in ranking["trials"][:1])
    tenant = {key: value for key, value in SWEPT.items() if key != "sweep"}
    alone = new_job("alone", acme={**tenant, "train": {**SWEPT["train"], "lr": values["train.lr"]}})
    alone.trained()
    refuse_unlike(adapter(job, winner, "last"), adapter(alone, "acme", "last"))
    refuse_unlike(adapter(job, "acme", "best"), adapter(alone, "acme", "best"))


ONE_AT_A_TIME = """
from evenload.plugins.lora import members
_missing = members.TenantTable._missing_bytes
def missing(self, tenant, *, beside=True):
    others = [one for one in self._job.host.adapters.numbers] if beside else []
    _missing(self, tenant, beside=beside)
    return 1e6 if others else 0.0
members.TenantTable._missing_bytes = missing
"""


def test_trials_that_do_not_fit_at_once_take_turns_and_the_same_one_wins(new_job, swept):
    job = new_job("job", acme=SWEPT)
    (ranking,) = job.trained(planted=ONE_AT_A_TIME)["sweeps"]
    (expected,) = swept[1]["sweeps"]
    assert ends_of(ranking) == ends_of(expected)
    refuse_unlike(adapter(job, "acme", "best"), adapter(swept[0], "acme", "best"))
    assert [row["step"] for row in job.rows(ranking["winner"])] == list(range(8))


KILLED = "    if step == 3: os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.mark.parametrize("checkpoint", ["checkpoint.dir=checkpoints", only_full("checkpoint.dir=null")])
def test_a_sweep_that_is_killed_between_rungs_comes_to_the_same_end(checkpoint, new_job, swept):
    """With a checkpoint behind step 2, at the first rung; and without, where those who were not dropped begin anew."""
    job = new_job("job", acme=SWEPT)
    assert job.run(checkpoint, "checkpoint.every=2", happens=KILLED).returncode != 0
    result = job.trained(checkpoint, "checkpoint.every=2")
    (ranking,) = result["sweeps"]
    (expected,) = swept[1]["sweeps"]
    assert ends_of(ranking) == ends_of(expected)
    refuse_unlike(adapter(job, "acme", "best"), adapter(swept[0], "acme", "best"))
    assert result["summary"]["steps"] == (6 if "checkpoints" in checkpoint else 8)


GONE = "    if step == 3: Path('held_out.jsonl').write_text('gone')\n"


def test_held_out_samples_that_change_end_their_tenant_and_nobody_else(new_job, plain):
    acme = {**ACME, "evaluate": {"source": "held_out.jsonl", "every": 2}}
    job = new_job("job", acme=acme, bolt={**BOLT, "evaluate": EVALUATE})
    rows = [{"input_ids": [(7 * i + k) % 250 for k in range(20 + i)]} for i in range(9)]
    (job.path / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = job.trained(happens=GONE)
    assert job.states(result) == {"acme": ("failed", 4), "bolt": ("done", 7)}
    (reason,) = (tenant["reason"] for tenant in result["tenants"] if tenant["name"] == "acme")
    assert "held_out.jsonl" in reason
    refuse_unlike(adapter(job, "bolt", "last"), adapter(plain, "bolt", "last"))


def test_a_bad_sweep_concerns_nobody_else(new_job):
    wrong = {**SWEPT, "sweep": {"train.rate": [1, 2]}}
    taken = {**SWEPT, "sweep": {"train.lr": [1e-3]}}
    bolt = {**BOLT, "train": {"steps": 2}}
    job = new_job("job", **{"acme": wrong, "bolt": bolt, "core": taken, "core.lr=0.001": bolt})
    result = job.trained()
    assert len(result["refused"]) == 2
    folder = job.path / "tenants"
    assert "did you mean" in (folder / "acme.error").read_text()
    (errors,) = (path.read_text() for path in folder.glob("core*.error"))
    assert "two tenants are called core.lr=0.001" in errors
    assert job.states(result)["bolt"] == ("done", 2)
