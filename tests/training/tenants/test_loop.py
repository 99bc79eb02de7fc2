"""Jobs of tenants: who comes, goes, fails or is killed, each trains as it would alone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from evenload.api import load_recipe
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.pretrained import folder_of
from evenload.training.tenants.arrivals.job import free_bytes

pytestmark = pytest.mark.slow
Forged = Callable[..., Any]

RECIPE = {
    "trainer": "megatron",
    "model": {"weights": "tiny-llama"},
    "parallel": {"dp": 1},
    "plugins": {
        "packing": {"enabled": True, "max_tokens": 2048},
        "lora": {"enabled": True, "tenants": "tenants", "out": "out"},
    },
    "checkpoint": {"dir": "checkpoints", "every": 2},
}
ACME: dict[str, Any] = {
    "data": {"source": "python-docstrings", "max_length": 256},
    "adapter": {"r": 4, "lora_dropout": 0.1},
    "train": {"steps": 6, "batch_size": 3, "lr": 2e-3, "lr_schedule": "cosine", "warmup_steps": 2},
}
BOLT: dict[str, Any] = {
    "data": {"source": "python-stdlib", "max_length": 192},
    "adapter": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "train": {"steps": 8, "batch_size": 2, "seed": 7, "lr": 1e-3, "weight_decay": 0.1},
}
CORE: dict[str, Any] = {
    "data": {
        "max_length": 128,
        "domains": {
            "held_out": {"source": "python-docstrings-held-out", "share": 3},
            "json": {"source": "python-stdlib/json", "weight": 2.0},
        },
        "mix": {"policy": "schedule", "points": [{"step": 1, "shares": {}}, {"step": 4, "shares": {"json": 9}}]},
    },
    "adapter": {"r": 2, "target_modules": ["down_proj"]},
    "train": {"steps": 5, "batch_size": 4, "lr": 1e-3},
}
ALL = {"acme": ACME, "bolt": BOLT, "core": CORE}
WEIGHTS = {"held_out": 1.0, "json": 2.0}
MIXED = [{"held_out": of, "json": 4 - of} for of in (3, 3, 2, 2, 1)]
"""Samples that steps of core draw of its domains."""

BEFORE_STEP = """
import json, os, signal
from pathlib import Path
from evenload.training.tenants import loop
_train = loop.TenantLoop._train
def train(self, planned):
    if self._job.leads:
        happens(self, self.step)
    _train(self, planned)
loop.TenantLoop._train = train
def happens(self, step):
    tenants = Path("tenants")
"""
"""Code that rank 0 runs before each step of the job: lines that follow, indented."""


IMPATIENT = """
from evenload.core.input import sandbox
sandbox.Budget.__init__.__defaults__ = (0.3, 0.0, 0.0)
"""
"""Code that leaves programs of tenants fewer CPU seconds than jobs do."""


class Place:
    """A folder in which a job runs."""

    def __init__(self, path: Path, forged: Forged) -> None:
        self.path, self.tenants, self.out, self._forged = path, path / "tenants", path / "out", forged
        self.tenants.mkdir()
        self.impatient = False
        (path / "r.yaml").write_text(yaml.safe_dump(RECIPE))

    def put(self, **tenants: dict[str, Any]) -> None:
        for name, tenant in tenants.items():
            (self.tenants / f"{name}.yaml").write_text(yaml.safe_dump(tenant))

    def run(self, *words: str, happens: str = "", ranks: int = 0) -> Any:
        planted = BEFORE_STEP + happens if happens else ""
        planted += IMPATIENT if self.impatient else ""
        return self._forged(self.path, "train", "r.yaml", *words, "--json", planted=planted, ranks=ranks)

    def trained(self, *words: str, happens: str = "", ranks: int = 0) -> dict[str, Any]:
        done = self.run(*words, happens=happens, ranks=ranks)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def series(self, name: str) -> tuple[list[list[int]], list[float]]:
        """Samples and losses of a tenant's steps."""
        lines = (self.out / name / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "loss" in row]
        assert [row["step"] for row in rows] == list(range(len(rows)))
        return [row["samples"] for row in rows], [row["loss"] for row in rows]

    def same_as(self, other: Place, name: str, steps: int) -> None:
        """The first steps of a tenant had the same samples here and there, and the same losses to rounding."""
        (samples, losses), (samples_there, losses_there) = self.series(name), other.series(name)
        assert len(losses) >= steps
        assert samples[:steps] == samples_there[:steps]
        assert losses[:steps] == pytest.approx(losses_there[:steps], rel=2e-6)


def states(result: dict[str, Any]) -> dict[str, tuple[str, int]]:
    return {tenant["name"]: (tenant["state"], tenant["step"]) for tenant in result["tenants"]}


@pytest.fixture
def place(tmp_path: Path, forged: Forged) -> Place:
    return Place(tmp_path, forged)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, forged: Forged) -> Place:
    """All three together, never disturbed."""
    place = Place(tmp_path_factory.mktemp("whole"), forged)
    place.put(**ALL)
    result = place.trained("log.jsonl=log.jsonl", "log.tensorboard=board")
    assert states(result) == {"acme": ("done", 6), "bolt": ("done", 8), "core": ("done", 5)}
    assert [row["num_tenants"] for row in result["steps"]] == [3] * 5 + [2] + [1] * 2
    return place


def test_logs_have_every_step_of_every_tenant(whole: Place) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    *lines, last = [json.loads(line) for line in (whole.path / "log.jsonl").read_text().splitlines()]
    assert list(last) == ["ends"]
    assert [sorted(line["tenants"]) for line in lines] == [sorted(ALL)] * 5 + [["acme", "bolt"]] + [["bolt"]] * 2
    assert [line["tenants"]["bolt"]["loss"] for line in lines] == whole.series("bolt")[1]
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


def test_each_trains_as_it_does_alone(place: Place, whole: Place) -> None:
    place.put(bolt=BOLT)
    place.trained()
    place.same_as(whole, "bolt", 8)


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.dp=2",),
        ("parallel.tp=2", "parallel.dp=null"),
        ("parallel.pp=3", "parallel.dp=null", "plugins.pipeline.enabled=true"),
        ("trainer=deepspeed", "parallel.dp=2", "deepspeed.zero_stage=3"),
    ],
)
def test_a_job_that_is_killed_goes_on_with_every_tenant_on_another_layout(
    place: Place, whole: Place, layout: tuple[str, ...]
) -> None:
    """Killed behind step 5, it goes on behind step 4; acme has two steps left, bolt four, core one."""
    place.put(**ALL)
    killed = place.run("log.jsonl=log.jsonl", happens="    if step == 5: os.kill(os.getpid(), signal.SIGKILL)\n")
    assert killed.returncode != 0
    assert [len(place.series(name)[0]) for name in ALL] == [5, 5, 5]
    result = place.trained(*layout, "log.jsonl=log.jsonl")
    assert result["summary"]["steps"] == 4
    logged = map(json.loads, (place.path / "log.jsonl").read_text().splitlines())
    assert [row["step"] for row in logged if "step" in row] == list(range(8))
    assert states(result) == {"acme": ("done", 6), "bolt": ("done", 8), "core": ("done", 5)}
    for name, steps in (("acme", 6), ("bolt", 8), ("core", 5)):
        place.same_as(whole, name, steps)
    again = place.trained(*layout)
    assert again["summary"]["steps"] == 0
    assert states(again) == states(result)


def test_tenants_come_leave_fail_and_are_wrong_and_nobody_else_notices(place: Place, whole: Place) -> None:
    place.put(acme=ACME, bolt=BOLT, nan={"data": CORE["data"], "train": {"lr": 1e24, "steps": 50}})
    place.put(wrong={**CORE, "adapter": {"target_modules": ["none_proj"]}}, left={**BOLT, "train": {"steps": 50}})
    (place.path / "core.yaml").write_text(yaml.safe_dump(CORE))
    happens = (
        "    if step == 1: os.rename('core.yaml', tenants / 'core.yaml')\n"
        "    if step == 3: (tenants / 'left.yaml').unlink()\n"
        "    if step == 4: (tenants / 'wrong.yaml').unlink()\n"
        "    Path('wrong.said').write_text(Path('tenants/wrong.error').read_text()) if step == 2 else None\n"
    )
    result = place.trained("parallel.dp=2", happens=happens)
    ended = states(result)
    assert {name: ended[name] for name in ("acme", "bolt", "core")} == {
        "acme": ("done", 6),
        "bolt": ("done", 8),
        "core": ("done", 5),
    }
    assert [row["num_tenants"] for row in result["steps"]][:2] == [4, 4]
    for name, steps in (("acme", 6), ("bolt", 8), ("core", 5)):
        place.same_as(whole, name, steps)
    assert ended["left"] == ("left", 4)
    assert (place.out / "left" / "last" / "adapter_model.safetensors").exists()
    assert ended["nan"][0] == "failed"
    reason = next(tenant["reason"] for tenant in result["tenants"] if tenant["name"] == "nan")
    assert reason.startswith("not finite: ")
    assert (place.out / "nan" / "last" / "adapter_model.safetensors").exists()
    assert "none_proj" in (place.path / "wrong.said").read_text()
    assert not (place.tenants / "wrong.error").exists()
    logged = json.loads((place.out / "core" / "status.json").read_text())
    assert (logged["state"], logged["steps"], logged["left_s"]) == ("done", 5, None)


LOOPS = "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}"


def attackers(place: Place) -> dict[str, dict[str, Any]]:
    """Files that try to end or to hold the job of all, each in its own way; those of the second half train."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (place.path / "own.jsonl").write_text(
        json.dumps({"messages": chat, "chat_template_kwargs": {"chat_template": LOOPS}}) + "\n"
    )
    (place.path / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    words = place.path / "words"
    shutil.copytree(folder_of(Path("tiny-llama")), words, ignore=shutil.ignore_patterns("*.safetensors"))
    (words / "chat_template.jinja").write_text(LOOPS)
    (words / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    few = {"steps": 3, "batch_size": 1}
    endless = {"source": "chat.jsonl", "tokenizer": "words"}
    patterns = {"bracket": "(", "forever": "([a-z0-9_.]+)+!"}
    refused: dict[str, dict[str, Any]] = {
        **{name: {**CORE, "adapter": {"rank_pattern": {key: 4}}} for name, key in patterns.items()},
        "row": {"data": {"source": "own.jsonl", "tokenizer": "words"}, "train": few},
        "words": {"data": endless, "train": few},
        "outside": {"data": {"source": "/etc/hosts"}},
    }
    os.symlink("loop.yaml", place.tenants / "loop.yaml")
    trained: dict[str, dict[str, Any]] = {name: {**CORE, "train": few} for name in ("torn", "odd", "pipe")}
    trained |= {"lost": {**CORE, "train": {"steps": 50}}, "raced": {**CORE, "sweep": {"train.lr": [1e-3, 2e-3]}}}
    place.put(**refused, **trained)
    for name in ("torn", "odd", "pipe", "raced"):
        (place.out / name).mkdir(parents=True)
    digests = {
        name: hashlib.blake2b((place.tenants / f"{name}.yaml").read_bytes(), digest_size=8).hexdigest()
        for name in trained
    }
    (place.out / "torn" / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe\n')
    (place.out / "odd" / "status.json").write_text(json.dumps({"file": digests["odd"], "state": "done"}))
    ranking = {"sweep": "raced", "winner": None, "best": None, "loss_is": "", "trials": [], "race": "mine"}
    (place.out / "raced" / "ranking.json").write_text(json.dumps({**ranking, "file": digests["raced"]}))
    os.mkfifo(place.out / "pipe" / "metrics.jsonl")
    return refused | {"loop": {}}


def test_attackers_harm_themselves_alone_and_poison_no_restart(place: Place, whole: Place) -> None:
    refused, place.impatient = attackers(place), True
    place.put(bolt=BOLT, core=CORE)
    happens = (
        "    if step == 1: (tenants / 'stop').mkdir()\n"
        "    if step == 2: os.rename('out/lost', 'gone'); Path('out/lost').touch()\n"
    )
    words = (f"plugins.lora.root={place.path}", "plugins.lora.wait=false")
    first = place.trained("parallel.dp=2", *words, happens=happens)
    second = place.trained(*words)
    for result in (first, second):
        assert set(result["refused"]) == set(refused)
        ended = states(result)
        assert {ended[name] for name in ("torn", "odd", "pipe")} == {("done", 3)}
        assert (ended["bolt"], ended["core"]) == (("done", 8), ("done", 5))
        assert ended["lost"][0] == "failed"
        assert {ended[f"raced.lr={lr}"] for lr in ("0.001", "0.002")} == {("done", 5)}
    for name in refused:
        assert (place.tenants / f"{name}.error").read_text().strip() == first["refused"][name]
    assert "lost" in (place.tenants / "lost.error").read_text()
    assert second["summary"]["steps"] < 5
    for name, steps in (("bolt", 8), ("core", 5)):
        place.same_as(whole, name, steps)


def test_those_whose_data_change_under_them_fail_alone(place: Place, whole: Place) -> None:
    """One file is cut short, the other exchanged for one whose rows are as long."""
    for name, token in (("own", 5), ("swapped", 5), ("other", 50)):
        rows = [json.dumps({"tokens": [token, 6, 7, 8 + i]}) for i in range(20)]
        (place.path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    for name in ("own", "swapped"):
        place.put(**{name: {"data": {"source": f"{name}.jsonl"}, "train": {"steps": 40, "batch_size": 2}}})
    place.put(core=CORE)
    happens = (
        "    import evenload.data.content as content\n"
        "    content.LOOK_S = 0.0\n"
        "    if step == 2: os.truncate('own.jsonl', 30)\n"
        "    if step == 2: os.replace('other.jsonl', 'swapped.jsonl')\n"
    )
    result = place.trained(happens=happens)
    assert states(result)["core"] == ("done", 5)
    for name in ("own", "swapped"):
        assert states(result)[name] == ("failed", 3)
        reason = next(tenant["reason"] for tenant in result["tenants"] if tenant["name"] == name)
        assert f"{name}.jsonl changed while it was in use" in reason
    place.same_as(whole, "core", 5)


def test_a_tenant_of_whom_ranks_read_other_samples_is_refused_alone(place: Place) -> None:
    rows = [json.dumps({"text": "ab" * (20 + number)}) for number in range(60)]
    (place.path / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    place.put(acme=ACME, torn={**ACME, "data": {"source": str(place.path / "corpus.jsonl"), "max_length": 192}})
    elsewhere = (
        "\nfrom evenload.data.sources import Source\n"
        "own = Source.fingerprint.fget\n"
        "torn = lambda self: own(self) + os.environ['RANK'] * ('corpus' in self.name)\n"
        "Source.fingerprint = property(torn)\n"
        "def happens(self, step): pass\n"
    )
    result = place.trained("parallel.dp=2", happens=elsewhere, ranks=2)
    assert states(result) == {"acme": ("done", 6)}
    assert "ranks read different samples for this tenant" in result["refused"]["torn"]


def test_who_does_not_fit_waits_in_order(place: Place, whole: Place) -> None:
    """Room for acme, 26,880 weights with gradients and moments; not for bolt's 10,752 beside it; core stands behind."""
    place.put(**ALL, huge={**CORE, "adapter": {"r": 64}})
    recipe = load_recipe(place.path / "r.yaml")
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    cluster = chain.context.cluster
    memory_bytes = cluster.memory_bytes + (16 * (26_880 + 5_000) - free_bytes(chain, 256)) / 0.9
    small = {**cluster.model_dump(mode="json"), "memory_bytes": memory_bytes}
    (place.path / "small.yaml").write_text(yaml.safe_dump(small))
    result = place.trained("cluster=small.yaml")
    assert states(result) == {"acme": ("done", 6), "bolt": ("done", 8), "core": ("done", 5)}
    assert [row["num_tenants"] for row in result["steps"]] == [1] * 6 + [2] * 5 + [1] * 3
    assert "does not fit into memory" in result["refused"]["huge"]
    assert "6.08 MiB are missing on a rank" in result["refused"]["huge"]
    for name, steps in (("acme", 6), ("bolt", 8), ("core", 5)):
        place.same_as(whole, name, steps)


def test_a_job_that_waits_takes_later_tenants_and_ends_when_it_is_told(place: Place, whole: Place) -> None:
    (place.path / "core.yaml").write_text(yaml.safe_dump(CORE))
    planted = (
        "import os, time\nfrom pathlib import Path\nfrom evenload.training.tenants import loop\n"
        "waits, turns = loop.TenantLoop._waits, []\n"
        "def _waits(self):\n"
        "    turns.append(1)\n"
        "    if self._job.leads and len(turns) == 2: os.rename('core.yaml', 'tenants/core.yaml')\n"
        "    if self._job.leads and self.step == 5: Path('tenants/stop').touch()\n"
        "    return waits(self)\n"
        "loop.TenantLoop._waits = _waits\n"
    )
    done = place._forged(place.path, "train", "r.yaml", "plugins.lora.wait=true", "--json", planted=planted)
    assert done.returncode == 0, done.stderr
    assert states(json.loads(done.stdout)) == {"core": ("done", 5)}
    said = [line for line in done.stderr.splitlines() if "nobody trains: waiting for files" in line]
    assert len(said) == 2  # before the first one came, and behind its end
    assert "a file stop there ends the job" in done.stderr
    place.same_as(whole, "core", 5)


def test_an_adapter_goes_on_from_its_folder_where_it_was_left(place: Place) -> None:
    """The evaluation before its first step is that behind the last step of whom it comes from."""
    held_out = {"source": "python-docstrings-held-out", "every": 50, "batches": 2}
    place.put(acme={**ACME, "evaluate": held_out})
    place.trained()
    place.put(heir={**ACME, "evaluate": held_out, "from": str(place.out / "acme" / "last")})
    place.put(other={**ACME, "adapter": {"r": 8}, "from": str(place.out / "acme" / "last")})
    result = place.trained()
    assert states(result) == {"acme": ("done", 6), "heir": ("done", 6)}
    assert "adapter.r is not that of the adapter to go on with" in result["refused"]["other"]
    before, after = evaluations(place, "acme")
    assert after < before
    assert evaluations(place, "heir")[0] == pytest.approx(after, rel=1e-6)


def evaluations(place: Place, name: str) -> list[float]:
    rows = map(json.loads, (place.out / name / "metrics.jsonl").read_text().splitlines())
    return [row["evaluation"]["loss"] for row in rows if "evaluation" in row]


def test_without_any_tenant_there_is_one_message(place: Place) -> None:
    done = place.run()
    assert done.returncode == 2
    assert "there is no tenant to train" in done.stderr
    place.put(wrong={"data": {"source": "none.jsonl"}})
    done = place.run()
    assert done.returncode == 2
    assert "no tenant can be trained; the first one, wrong: " in done.stderr


def test_a_job_that_is_stopped_goes_on_and_who_has_ended_is_not_trained_again(place: Place, whole: Place) -> None:
    """Three more: one leaves while no job runs, one is put in again and begins anew, and one whose file changes
    meanwhile begins anew too."""
    edited = {**CORE, "train": {"steps": 6, "batch_size": 4}}
    place.put(**ALL, short={**CORE, "train": {"steps": 2}}, away={**CORE, "train": {"steps": 50}}, edited=edited)
    stopped = place.trained(happens="    if step == 3: (tenants / 'stop').touch()\n")
    ended = states(stopped)
    assert ended.pop("short") == ("done", 2)
    assert set(ended.values()) == {("waiting", 4)}
    assert (place.out / "acme" / "last" / "adapter_config.json").exists()
    (place.tenants / "away.yaml").unlink()
    samples_before, _ = place.series("edited")
    place.put(edited={**edited, "train": {**edited["train"], "seed": 9}})
    happens = (
        "    if step == 5: (tenants / 'short.yaml').rename('short.yaml')\n"
        "    if step == 6: Path('short.yaml').rename(tenants / 'short.yaml')\n"
        "    if step == 6: (tenants / 'acme.yaml').touch()\n"
    )
    result = place.trained("parallel.dp=2", happens=happens)
    assert states(result) == {
        "acme": ("done", 6),
        "bolt": ("done", 8),
        "core": ("done", 5),
        "short": ("done", 2),
        "away": ("left", 4),
        "edited": ("done", 6),
    }
    assert len(states(result)) == len(result["tenants"])
    for name, steps in (("acme", 6), ("bolt", 8), ("core", 5)):
        place.same_as(whole, name, steps)
    assert json.loads((place.out / "away" / "status.json").read_text())["state"] == "left"
    # acme and core have two steps and one left, bolt four, edited all six; short has two, behind the others' last ones.
    assert [row["num_tenants"] for row in result["steps"]] == [4, 3, 2, 2, 2, 2]
    assert place.series("edited")[0][:4] != samples_before


def test_without_a_checkpoint_who_is_done_stays_done_unless_the_job_begins_anew(place: Place) -> None:
    place.put(core=CORE)
    place.trained("checkpoint.dir=null")
    again = place.trained("checkpoint.dir=null")
    assert (again["summary"]["steps"], states(again)) == (0, {"core": ("done", 5)})
    anew = place.trained("checkpoint.dir=null", "checkpoint.resume=false")
    assert (anew["summary"]["steps"], states(anew)) == (5, {"core": ("done", 5)})
    place.put(core={**CORE, "train": {**CORE["train"], "steps": 3}})
    other = place.trained("checkpoint.dir=null")
    assert (other["summary"]["steps"], states(other)) == (3, {"core": ("done", 3)})


def test_settings_that_tenants_have_themselves_are_said_to_be_without_effect(place: Place) -> None:
    place.put(core={**CORE, "train": {"steps": 1}})
    done = place.run("train.lr=0.1", "train.steps=7", "data.max_length=64", "planner.refit=true")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stderr.splitlines() if "have no effect" in line)
    assert "data.max_length, planner.refit, train.lr, train.steps have no effect where tenants are trained" in line


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--against", "stock"), "baselines do not train tenants beside evenload"),
        (("train.export=exported",), "train.export writes a whole model, and tenants leave adapters"),
        (("model.weights=null",), "nobody says how large the vocabulary of the base is"),
        (("plugins.lora.tenants=null",), "nobody says where the tenants are"),
        (("plugins.lora.tenants=nowhere",), "the folder of tenants"),
    ],
)
def test_what_a_job_of_tenants_cannot_do_is_refused_by_name(place: Place, words: tuple[str, ...], what: str) -> None:
    place.put(core=CORE)
    done = place.run(*words)
    assert done.returncode == 2
    assert what in done.stderr


def test_bench_which_trains_one_model_is_refused(place: Place, forged: Forged) -> None:
    done = forged(place.path, "bench", "r.yaml")
    assert done.returncode == 2
    assert "bench trains one model by several plans, and no tenants" in done.stderr


def test_a_job_that_a_scheduler_ends_keeps_all_tenants_where_they_were(place: Place, whole: Place) -> None:
    place.put(**ALL)
    ended = place.run(happens="    if step == 3: os.kill(os.getpid(), signal.SIGTERM)\n")
    assert ended.returncode == 75, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["ended_early"], set(states(result).values())) == ("SIGTERM", {("waiting", 4)})
    place.trained("parallel.dp=2")
    for name, steps in (("acme", 6), ("bolt", 8), ("core", 5)):
        place.same_as(whole, name, steps)
