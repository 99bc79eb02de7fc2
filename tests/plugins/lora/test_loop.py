"""Jobs of tenants: who comes, goes, fails or is killed, each trains as it would alone."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from evenload.api import load_recipe
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.pretrained import folder_of
from evenload.plugins.lora.arrivals.job import free_bytes
from harness.cases import only_full

pytestmark = pytest.mark.slow

KEPT = {"dir": "checkpoints", "every": 2}
ACME = {
    "data": {"source": "python-docstrings/email", "max_length": 256},
    "adapter": {"r": 4, "lora_dropout": 0.1},
    "train": {"steps": 6, "batch_size": 3, "lr": 2e-3, "lr_schedule": "cosine", "warmup_steps": 2},
}
BOLT = {
    "data": {"source": "python-docstrings/asyncio", "max_length": 192},
    "adapter": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "train": {"steps": 8, "batch_size": 2, "seed": 7, "lr": 1e-3, "weight_decay": 0.1},
}
CORE = {
    "data": {
        "max_length": 128,
        "domains": {
            "held_out": {"source": "python-docstrings-held-out/email", "share": 3},
            "json": {"source": "python-docstrings/logging", "weight": 2.0},
        },
        "mix": {"policy": "schedule", "points": [{"step": 1, "shares": {}}, {"step": 4, "shares": {"json": 9}}]},
    },
    "adapter": {"r": 2, "target_modules": ["down_proj"]},
    "train": {"steps": 5, "batch_size": 4, "lr": 1e-3},
}
ALL = {"acme": ACME, "bolt": BOLT, "core": CORE}
ENDS = {"acme": 6, "bolt": 8, "core": 5}
DONE = {name: ("done", steps) for name, steps in ENDS.items()}
WEIGHTS = {"held_out": 1.0, "json": 2.0}
MIXED = [{"held_out": of, "json": 4 - of} for of in (3, 3, 2, 2, 1)]
"""Samples that steps of core draw of its domains."""

IMPATIENT = """
from evenload.core.input import sandbox
sandbox.Budget.__init__.__defaults__ = (0.3, 0.0, 0.0)
"""
"""Code that leaves programs of tenants fewer CPU seconds than jobs do."""


def series(job, name):
    """Samples and losses of a tenant's steps."""
    rows = job.rows(name)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["samples"] for row in rows], [row["loss"] for row in rows]


def refuse_unlike(job, whole, steps=ENDS):
    """The first steps of these tenants had the same samples here and there, and the same losses to rounding."""
    for name, count in steps.items():
        (samples, losses), (samples_there, losses_there) = series(job, name), series(whole, name)
        assert len(losses) >= count
        assert samples[:count] == samples_there[:count]
        assert losses[:count] == pytest.approx(losses_there[:count], rel=2e-6)


@pytest.fixture
def job(tmp_path, job_of):
    return job_of(tmp_path, checkpoint=KEPT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, job_of):
    """All three together, never disturbed."""
    job = job_of(tmp_path_factory.mktemp("whole"), checkpoint=KEPT)
    job.put(**ALL)
    without_effect = "train.lr=0.1", "train.steps=7", "data.max_length=64", "planner.refit=true"
    result = job.trained("log.jsonl=log.jsonl", "log.tensorboard=board", *without_effect)
    assert job.states(result) == DONE
    assert [row["num_tenants"] for row in result["steps"]] == [3] * 5 + [2] + [1] * 2
    return job


@pytest.fixture(scope="module")
def killed(tmp_path_factory, job_of):
    """All three, killed behind step 5."""
    job = job_of(tmp_path_factory.mktemp("killed"), checkpoint=KEPT)
    job.put(**ALL)
    done = job.run("log.jsonl=log.jsonl", happens="    if step == 5: os.kill(os.getpid(), signal.SIGKILL)\n")
    assert done.returncode != 0
    assert [len(series(job, name)[0]) for name in ALL] == [5, 5, 5]
    return job


def test_logs_have_every_step_of_every_tenant(whole):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    *lines, last = [json.loads(line) for line in (whole.path / "log.jsonl").read_text().splitlines()]
    assert list(last) == ["ends"]
    assert [sorted(line["tenants"]) for line in lines] == [sorted(ALL)] * 5 + [["acme", "bolt"]] + [["bolt"]] * 2
    assert [line["tenants"]["bolt"]["loss"] for line in lines] == series(whole, "bolt")[1]
    board = EventAccumulator(str(whole.path / "board")).Reload()
    assert len(board.Scalars("evenload/tenants/acme/loss")) == 6
    own = [line["tenants"]["core"] for line in lines[:5]]
    assert [{name: one["samples"] for name, one in row["domains"].items()} for row in own] == MIXED
    for row in own:
        counts = {name: WEIGHTS[name] * one["targets"] for name, one in row["domains"].items()}
        mean = sum(row["domains"][name]["loss"] * count for name, count in counts.items()) / sum(counts.values())
        assert mean == pytest.approx(row["loss"], rel=1e-6), "domains are told without the weights that the loss has"
    shown = [event.value for event in board.Scalars("evenload/tenants/core/domains/json/loss")]
    assert shown == pytest.approx([row["domains"]["json"]["loss"] for row in own if "json" in row["domains"]])


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.dp=2",),
        only_full(("parallel.tp=2", "parallel.dp=null")),
        only_full(("parallel.pp=3", "parallel.dp=null", "plugins.pipeline.enabled=true")),
        only_full(("trainer=deepspeed", "parallel.dp=2", "deepspeed.zero_stage=3")),
    ],
)
def test_a_job_that_is_killed_goes_on_with_every_tenant_on_another_layout(tmp_path, killed, whole, layout):
    """It goes on behind step 4; acme has two steps left, bolt four, core one."""
    job = killed.copy(tmp_path)
    result = job.trained(*layout, "log.jsonl=log.jsonl")
    assert result["summary"]["steps"] == 4
    logged = map(json.loads, (job.path / "log.jsonl").read_text().splitlines())
    assert [row["step"] for row in logged if "step" in row] == list(range(8))
    assert job.states(result) == DONE
    refuse_unlike(job, whole)


def test_tenants_come_leave_fail_and_are_wrong_and_nobody_else_notices(job, whole):
    job.put(acme=ACME, bolt=BOLT, nan={"data": CORE["data"], "train": {"lr": 1e24, "steps": 50}})
    job.put(wrong={**CORE, "adapter": {"target_modules": ["none_proj"]}}, left={**BOLT, "train": {"steps": 50}})
    (job.path / "core.yaml").write_text(yaml.safe_dump(CORE))
    happens = (
        "    if step == 1: os.rename('core.yaml', tenants / 'core.yaml')\n"
        "    if step == 3: (tenants / 'left.yaml').unlink()\n"
        "    if step == 4: (tenants / 'wrong.yaml').unlink()\n"
        "    Path('wrong.said').write_text(Path('tenants/wrong.error').read_text()) if step == 2 else None\n"
    )
    result = job.trained("parallel.dp=2", happens=happens)
    ended = job.states(result)
    assert ended.items() >= DONE.items()
    assert [row["num_tenants"] for row in result["steps"]][:2] == [4, 4]
    refuse_unlike(job, whole)
    assert ended["left"] == ("left", 4)
    assert (job.out / "left" / "last" / "adapter_model.safetensors").exists()
    assert ended["nan"][0] == "failed"
    reason = next(tenant["reason"] for tenant in result["tenants"] if tenant["name"] == "nan")
    assert reason.startswith("not finite: ")
    assert (job.out / "nan" / "last" / "adapter_model.safetensors").exists()
    assert "none_proj" in (job.path / "wrong.said").read_text()
    assert not (job.tenants / "wrong.error").exists()
    logged = json.loads((job.out / "core" / "status.json").read_text())
    assert (logged["state"], logged["steps"], logged["left_s"]) == ("done", 5, None)


LOOPS = "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}"


def attackers(job):
    """Files that try to end or to hold the job of all, each in its own way; those of the second half train."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (job.path / "own.jsonl").write_text(
        json.dumps({"messages": chat, "chat_template_kwargs": {"chat_template": LOOPS}}) + "\n"
    )
    (job.path / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    words = job.path / "words"
    shutil.copytree(folder_of(Path("tiny-llama")), words, ignore=shutil.ignore_patterns("*.safetensors"))
    (words / "chat_template.jinja").write_text(LOOPS)
    (words / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    few = {"steps": 3, "batch_size": 1}
    endless = {"source": "chat.jsonl", "tokenizer": "words"}
    patterns = {"bracket": "(", "forever": "([a-z0-9_.]+)+!"}
    refused = {
        **{name: {**CORE, "adapter": {"rank_pattern": {key: 4}}} for name, key in patterns.items()},
        "row": {"data": {"source": "own.jsonl", "tokenizer": "words"}, "train": few},
        "words": {"data": endless, "train": few},
        "outside": {"data": {"source": "/etc/hosts"}},
    }
    os.symlink("loop.yaml", job.tenants / "loop.yaml")
    trained = {name: {**CORE, "train": few} for name in ("torn", "odd", "pipe")}
    trained |= {"lost": {**CORE, "train": {"steps": 50}}, "raced": {**CORE, "sweep": {"train.lr": [1e-3, 2e-3]}}}
    job.put(**refused, **trained)
    for name in ("torn", "odd", "pipe", "raced"):
        (job.out / name).mkdir(parents=True)
    digests = {
        name: hashlib.blake2b((job.tenants / f"{name}.yaml").read_bytes(), digest_size=8).hexdigest()
        for name in trained
    }
    (job.out / "torn" / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe\n')
    (job.out / "odd" / "status.json").write_text(json.dumps({"file": digests["odd"], "state": "done"}))
    ranking = {"sweep": "raced", "winner": None, "best": None, "loss_is": "", "trials": [], "race": "mine"}
    (job.out / "raced" / "ranking.json").write_text(json.dumps({**ranking, "file": digests["raced"]}))
    os.mkfifo(job.out / "pipe" / "metrics.jsonl")
    return refused | {"loop": {}}


@pytest.mark.parametrize("layout", [(), only_full(("parallel.dp=2",))])
def test_attackers_harm_themselves_alone_and_poison_no_restart(layout, job, whole):
    refused = attackers(job)
    job.put(bolt=BOLT, core=CORE)
    happens = (
        "    if step == 1: (tenants / 'stop').mkdir()\n"
        "    if step == 2: os.rename('out/lost', 'gone'); Path('out/lost').touch()\n"
    )
    words = (f"plugins.lora.root={job.path}", "plugins.lora.wait=false")
    first = job.trained(*layout, *words, happens=happens, planted=IMPATIENT)
    second = job.trained(*words, planted=IMPATIENT)
    for result in (first, second):
        assert set(result["refused"]) == set(refused)
        ended = job.states(result)
        assert {ended[name] for name in ("torn", "odd", "pipe")} == {("done", 3)}
        assert (ended["bolt"], ended["core"]) == (("done", 8), ("done", 5))
        assert ended["lost"][0] == "failed"
        assert {ended[f"raced.lr={lr}"] for lr in ("0.001", "0.002")} == {("done", 5)}
    for name in refused:
        assert (job.tenants / f"{name}.error").read_text().strip() == first["refused"][name]
    assert "lost" in (job.tenants / "lost.error").read_text()
    assert second["summary"]["steps"] < 5
    refuse_unlike(job, whole, {"bolt": 8, "core": 5})


def test_those_whose_data_change_under_them_fail_alone(job, whole):
    """One file is cut short, the other exchanged for one whose rows are as long."""
    for name, token in (("own", 5), ("swapped", 5), ("other", 50)):
        rows = [json.dumps({"tokens": [token, 6, 7, 8 + i]}) for i in range(20)]
        (job.path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    for name in ("own", "swapped"):
        job.put(**{name: {"data": {"source": f"{name}.jsonl"}, "train": {"steps": 40, "batch_size": 2}}})
    job.put(core=CORE)
    happens = (
        "    import evenload.data.content as content\n"
        "    content.LOOK_S = 0.0\n"
        "    if step == 2: os.truncate('own.jsonl', 30)\n"
        "    if step == 2: os.replace('other.jsonl', 'swapped.jsonl')\n"
    )
    result = job.trained(happens=happens)
    assert job.states(result)["core"] == ("done", 5)
    for name in ("own", "swapped"):
        assert job.states(result)[name] == ("failed", 3)
        reason = next(tenant["reason"] for tenant in result["tenants"] if tenant["name"] == name)
        assert f"{name}.jsonl changed while it was in use" in reason
    refuse_unlike(job, whole, {"core": 5})


def test_a_tenant_of_whom_ranks_read_other_samples_is_refused_alone(job):
    rows = [json.dumps({"text": "ab" * (20 + number)}) for number in range(60)]
    (job.path / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    job.put(acme=ACME, torn={**ACME, "data": {"source": str(job.path / "corpus.jsonl"), "max_length": 192}})
    elsewhere = (
        "import os\nfrom evenload.data.sources import Source\n"
        "own = Source.fingerprint.fget\n"
        "torn = lambda self: own(self) + os.environ['RANK'] * ('corpus' in self.name)\n"
        "Source.fingerprint = property(torn)\n"
    )
    result = job.trained("parallel.dp=2", planted=elsewhere)
    assert job.states(result) == {"acme": ("done", 6)}
    assert "ranks read different samples for this tenant" in result["refused"]["torn"]


def test_who_does_not_fit_waits_in_order(job, whole):
    """Room for acme, 26,880 weights with gradients and moments; not for bolt's 10,752 beside it; core stands behind."""
    job.put(**ALL, huge={**CORE, "adapter": {"r": 64}})
    recipe = load_recipe(job.path / "r.yaml")
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    cluster = chain.context.cluster
    memory_bytes = cluster.memory_bytes + (16 * (26_880 + 5_000) - free_bytes(chain, 256)) / 0.9
    small = {**cluster.model_dump(mode="json"), "memory_bytes": memory_bytes}
    (job.path / "small.yaml").write_text(yaml.safe_dump(small))
    result = job.trained("cluster=small.yaml")
    assert job.states(result) == DONE
    assert [row["num_tenants"] for row in result["steps"]] == [1] * 6 + [2] * 5 + [1] * 3
    assert "does not fit into memory" in result["refused"]["huge"]
    assert "6.08 MiB are missing on a rank" in result["refused"]["huge"]
    refuse_unlike(job, whole)


def test_a_job_that_waits_takes_later_tenants_and_ends_when_it_is_told(job, whole):
    (job.path / "core.yaml").write_text(yaml.safe_dump(CORE))
    planted = (
        "import os, time\nfrom pathlib import Path\nfrom evenload.plugins.lora import loop\n"
        "waits, turns = loop.TenantLoop._waits, []\n"
        "def _waits(self):\n"
        "    turns.append(1)\n"
        "    if self._job.is_rank0 and len(turns) == 2: os.rename('core.yaml', 'tenants/core.yaml')\n"
        "    if self._job.is_rank0 and self.step == 5: Path('tenants/stop').touch()\n"
        "    return waits(self)\n"
        "loop.TenantLoop._waits = _waits\n"
    )
    done = job.run("plugins.lora.wait=true", planted=planted)
    assert done.returncode == 0, done.stderr
    assert job.states(json.loads(done.stdout)) == {"core": ("done", 5)}
    said = [line for line in done.stderr.splitlines() if "nobody trains: waiting for files" in line]
    assert len(said) == 2  # before the first one came, and behind its end
    assert "a file stop there ends the job" in done.stderr
    refuse_unlike(job, whole, {"core": 5})


def test_an_adapter_goes_on_from_its_folder_where_it_was_left(job):
    """The evaluation before its first step is that behind the last step of whom it comes from."""
    held_out = {"source": "python-docstrings-held-out/email", "every": 50, "batches": 2}
    job.put(acme={**ACME, "evaluate": held_out})
    job.trained()
    job.put(heir={**ACME, "evaluate": held_out, "from": str(job.out / "acme" / "last")})
    job.put(other={**ACME, "adapter": {"r": 8}, "from": str(job.out / "acme" / "last")})
    result = job.trained()
    assert job.states(result) == {"acme": ("done", 6), "heir": ("done", 6)}
    assert "adapter.r is not that of the adapter to go on with" in result["refused"]["other"]
    before, after = (row["loss"] for row in job.rows("acme", evaluations=True))
    assert after < before
    assert job.rows("heir", evaluations=True)[0]["loss"] == pytest.approx(after, rel=1e-6)


def test_without_any_tenant_there_is_one_message(job):
    done = job.run()
    assert done.returncode == 2
    assert "there is no tenant to train" in done.stderr
    job.put(wrong={"data": {"source": "none.jsonl"}})
    done = job.run()
    assert done.returncode == 2
    assert "no tenant can be trained; the first one, wrong: " in done.stderr


def test_a_job_that_is_stopped_goes_on_and_who_has_ended_is_not_trained_again(job, whole):
    """Three more: one leaves while no job runs, one is put in again and begins anew, and one whose file changes
    meanwhile begins anew too."""
    edited = {**CORE, "train": {"steps": 6, "batch_size": 4}}
    job.put(**ALL, short={**CORE, "train": {"steps": 2}}, away={**CORE, "train": {"steps": 50}}, edited=edited)
    stopped = job.trained(happens="    if step == 3: (tenants / 'stop').touch()\n")
    ended = job.states(stopped)
    assert ended.pop("short") == ("done", 2)
    assert set(ended.values()) == {("waiting", 4)}
    assert (job.out / "acme" / "last" / "adapter_config.json").exists()
    (job.tenants / "away.yaml").unlink()
    samples_before, _ = series(job, "edited")
    job.put(edited={**edited, "train": {**edited["train"], "seed": 9}})
    happens = (
        "    if step == 5: (tenants / 'short.yaml').rename('short.yaml')\n"
        "    if step == 6: Path('short.yaml').rename(tenants / 'short.yaml')\n"
        "    if step == 6: (tenants / 'acme.yaml').touch()\n"
    )
    result = job.trained(happens=happens)
    assert job.states(result) == DONE | {"short": ("done", 2), "away": ("left", 4), "edited": ("done", 6)}
    assert len(job.states(result)) == len(result["tenants"])
    refuse_unlike(job, whole)
    assert json.loads((job.out / "away" / "status.json").read_text())["state"] == "left"
    # acme and core have two steps and one left, bolt four, edited all six; short has two, behind the others' last ones.
    assert [row["num_tenants"] for row in result["steps"]] == [4, 3, 2, 2, 2, 2]
    assert series(job, "edited")[0][:4] != samples_before


def test_without_a_checkpoint_who_is_done_stays_done_unless_the_job_begins_anew(job):
    job.put(core={**CORE, "train": {"steps": 2}})
    job.trained("checkpoint.dir=null")
    again = job.trained("checkpoint.dir=null")
    assert (again["summary"]["steps"], job.states(again)) == (0, {"core": ("done", 2)})
    anew = job.trained("checkpoint.dir=null", "checkpoint.resume=false")
    assert (anew["summary"]["steps"], job.states(anew)) == (2, {"core": ("done", 2)})
    job.put(core={**CORE, "train": {"steps": 1}})
    other = job.trained("checkpoint.dir=null")
    assert (other["summary"]["steps"], job.states(other)) == (1, {"core": ("done", 1)})


def test_settings_that_tenants_have_themselves_are_said_to_be_without_effect(whole):
    (line,) = (line for line in whole.said.splitlines() if "have no effect" in line)
    assert "data.max_length, planner.refit, train.lr, train.steps have no effect where tenants are trained" in line


@pytest.mark.parametrize(
    ("verb", "words", "what"),
    [
        ("train", ("--against", "stock"), "baselines do not train tenants next to evenload"),
        ("train", ("train.export=exported",), "train.export writes a whole model, and tenants leave adapters"),
        ("train", ("model.weights=null",), "nobody says how large the vocabulary of the base is"),
        ("train", ("plugins.lora.tenants=null",), "nobody says where the tenants are"),
        ("train", ("plugins.lora.tenants=nowhere",), "the folder of tenants"),
        ("bench", (), "bench trains one model by several plans, and no tenants"),
    ],
)
def test_what_a_job_of_tenants_cannot_do_is_refused_by_name(job, forged, verb, words, what):
    job.put(core=CORE)
    done = forged(job.path, verb, "r.yaml", *words)
    assert done.returncode == 2
    assert what in done.stderr


def test_a_job_that_a_scheduler_ends_keeps_all_tenants_where_they_were(job):
    job.put(**ALL)
    ended = job.run(happens="    if step == 3: os.kill(os.getpid(), signal.SIGTERM)\n")
    assert ended.returncode == 75, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["ended_early"], set(job.states(result).values())) == ("SIGTERM", {("waiting", 4)})
    assert all((job.out / name / "last" / "adapter_config.json").exists() for name in ALL)
