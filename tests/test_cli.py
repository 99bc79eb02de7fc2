"""The verbs that need no trainer, as a user runs them, also where torch cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import evenload
import numpy as np
import pytest
from evenload.core.plan_json import read_plans
from harness.commands import Commands, Done, command

ROOT = Path(evenload.__file__).parent
PLAN = ("plan", "recipe.yaml", "--lengths", "lengths.txt")
WITHOUT_TRAINERS = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron", "deepspeed", "transformers", "accelerate"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Refuse())
import importlib.metadata as metadata
found = metadata.version
def version(name):
    if name in ("torch", "megatron-core", "deepspeed", "transformers", "accelerate"):
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
import importlib.util as util
spec_of, hidden = util.find_spec, ("torch", "megatron", "deepspeed")
util.find_spec = lambda name, package=None: None if name in hidden else spec_of(name, package)
"""


@pytest.fixture(scope="module")
def bare() -> Iterator[Callable[..., Done]]:
    """The command where torch and the trainers are hidden from it."""
    commands = Commands(WITHOUT_TRAINERS)
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "recipe.yaml").write_text(
        "parallel: {dp: 8}\ntrain: {global_batch_size: 64}\ndata: {max_length: 2048}\n"
        "plugins: {packing: {enabled: true, max_tokens: 4096}}\n"
    )
    lengths = np.random.default_rng(0).lognormal(5.5, 1.2, 4000).astype(int) + 1
    (folder / "lengths.txt").write_text("\n".join(map(str, lengths)) + "\n")
    return folder


def answer(done: Done) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_plan_and_doctor_work_without_torch(place: Path, bare: Callable[..., Done]) -> None:
    assert answer(bare(place, *PLAN, "--json"))["steps"][0]["imbalance"] >= 1
    report = answer(bare(place, "doctor", "--json"))
    assert report["trainers"] == {"megatron": False, "deepspeed": False, "transformers": False}
    assert {row["status"] for row in report["hosts"]} == {"missing"}
    assert [row["name"] for row in report["solver"]] == ["PuLP", "HiGHS"]


def test_tenants_are_planned_without_torch_and_without_lengths(place: Path, bare: Callable[..., Done]) -> None:
    (place / "clients").mkdir()
    for name, length in (("acme", 900), ("beta", 30)):
        rows = "".join(json.dumps({"input_ids": [1] * length}) + "\n" for _ in range(4))
        (place / f"{name}.jsonl").write_text(rows)
        (place / "clients" / f"{name}.yaml").write_text(f"data: {{source: {name}.jsonl}}\ntrain: {{batch_size: 2}}")
    settings = ("plugins.lora.enabled=true", "plugins.lora.tenants=clients", "parallel.dp=2")
    found = answer(bare(place, "plan", "recipe.yaml", *settings, "--json", "--out", "t.json"))["tenants"]
    assert [(row["name"], row["tokens"]) for row in found["tenants"]] == [("acme", 1800), ("beta", 60)]
    assert found["saving"] > 1
    (plan,) = read_plans(place / "t.json")
    assert sorted(plan.tenants.tolist()) == [0, 0, 1, 1]


def test_data_are_planned_by_their_tokenizer_and_the_recipe_s_own_without_lengths(
    place: Path, bare: Callable[..., Done]
) -> None:
    rows = [{"prompt": "x" * size, "completion": "y" * 9} for size in range(1, 71)]
    (place / "d.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = (["--lengths", "d.jsonl", "--tokenizer", "bytes"], ["data.source=d.jsonl"])
    for words in options:
        done = bare(place, "plan", "recipe.yaml", *words, "--json")
        assert answer(done)["samples"] == 70
        assert "70 lengths of d.jsonl, taken in " in done.stderr
    (place / "bare").mkdir(exist_ok=True)
    done = bare(place, "plan", "recipe.yaml", "--lengths", "bare")
    assert done.returncode == 2
    assert "holds no .arrow or .parquet file" in done.stderr


def test_a_missing_trainer_is_named_before_anything_starts(place: Path, bare: Callable[..., Done]) -> None:
    done = bare(place, "train", "recipe.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    packages = "'torch<3,>=2.9' 'megatron-core<0.20,>=0.16.1' 'transformers<6,>=5'"
    assert f"do: pip install {packages}" in done.stderr
    assert "the rest of the extra evenload[megatron]\n" in done.stderr


def test_export_names_what_it_needs_before_it_looks_for_a_checkpoint(place: Path, bare: Callable[..., Done]) -> None:
    done = bare(place, "export", "nowhere", "--out", "model")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("evenload: a model's folder needs torch\n  found: it is not installed\n")
    assert "'torch<3,>=2.9' 'transformers<6,>=5': the rest of the extra evenload[megatron]" in done.stderr


@pytest.mark.parametrize("verb", ["train", "verify", "bench", "profile"])
def test_evenloads_own_loop_refuses_a_trainer_that_runs_its_own(place: Path, verb: str) -> None:
    words = ("data.source=lengths.txt",) if verb == "train" else ()
    done = command(place, verb, "recipe.yaml", "trainer=transformers", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("evenload: evenload's own loop does not drive trainer transformers\n")
    assert "evenload run RECIPE -- COMMAND" in done.stderr


def test_a_trainer_that_runs_its_own_loop_is_planned(place: Path) -> None:
    (step,) = answer(command(place, *PLAN, "trainer=transformers", "--json"))["steps"]
    assert step["micro_batches"] % 8 == 0, "every rank runs as many"


def test_plan_reports_what_the_readme_promises(place: Path) -> None:
    steps = answer(command(place, *PLAN, "--steps", "3", "--json"))["steps"]
    assert len(steps) == 3
    for step in steps:
        assert min(step["micro_batch_imbalance"].values()) >= 1.0
        assert step["peak_bytes"] > 0
        assert step["bound_s"] <= step["step_s"] <= min(b["step_s"] for b in step["baselines"].values()) * 1.0001


def test_plan_explains_what_every_rank_runs(place: Path) -> None:
    (step,) = answer(command(place, *PLAN, "--explain", "--json"))["steps"]
    cells = " ".join(step["program"]).split()
    assert {f"{kind}{i}" for kind in "FB" for i in range(step["micro_batches"])} <= set(cells)
    told = command(place, *PLAN, "--explain")
    assert told.returncode == 0, told.stderr
    assert step["program"][1] in told.stdout


def test_tenants_of_a_job_are_listed_without_torch(place: Path, bare: Callable[..., Done]) -> None:
    out = place / "adapters" / "out"
    failed = {"name": "zenith", "steps": 40, "state": "failed", "step": 0}
    for status in (failed, {**failed, "name": "acme", "state": "training", "step": 3, "loss": 2.5}):
        (out / str(status["name"])).mkdir(parents=True)
        (out / str(status["name"]) / "status.json").write_text(json.dumps(status))
    for folder in ("adapters", "adapters/out"):
        rows = answer(bare(place, "lora", folder, "--json"))["tenants"]
        assert [(row["name"], row["state"], row["step"], row["loss"]) for row in rows] == [
            ("acme", "training", 3, 2.5),
            ("zenith", "failed", 0, None),
        ]
    table = bare(place, "lora", "adapters").stdout
    assert "zenith" in table
    assert "3 of 40" in table


NO_ROOM = ("plugins.packing.max_tokens=64", "plugins.packing.activation_gib=0.00001")
WRONG = {
    "no folder of tenants": ("lora", "nothing"),
    "a folder without tenants": ("lora", "."),
    "a damaged status": ("lora", "damaged"),
    "no such recipe": ("plan", "nothing.yaml", "--lengths", "lengths.txt"),
    "no such lengths": ("plan", "recipe.yaml", "--lengths", "nothing.txt"),
    "unknown key": (*PLAN, "train.stepz=3"),
    "zero length": ("plan", "recipe.yaml", "--lengths", "zero.txt"),
    "too few samples": (*PLAN, "train.global_batch_size=100000"),
    "cap below the longest": (*PLAN, "plugins.packing.max_tokens=1000", "plugins.packing.slices=off"),
    "cap below a block": (*PLAN, "plugins.packing.max_tokens=3"),
    "no room for keys": (*PLAN, *NO_ROOM),
    "no room in training": ("train", "recipe.yaml", *NO_ROOM),
    "unwritable out": (*PLAN, "--out", "no/such/folder/plan.json"),
    "unknown cluster": (*PLAN, "cluster=moon"),
    "unknown costs": (*PLAN, "costs=moon"),
    "unknown command": ("plane",),
    "unknown option": ("plan", "recipe.yaml", "--lenghts", "lengths.txt"),
    "unknown baseline": ("bench", "recipe.yaml", "--against", "inorder"),
    "data not there": ("train", "recipe.yaml", "data.source=nothing.jsonl"),
    "wrong number of ranks": ("train", "recipe.yaml", "--nproc", "3"),
    "no number of ranks": ("search", "recipe.yaml", "--lengths", "lengths.txt", "--nproc", ""),
    "no ranks": (*PLAN, "--nproc", "0"),
    "more ranks than samples": (*PLAN, "parallel.dp=null", "--nproc", "65"),
    "more ranks than a machine has": ("train", "recipe.yaml", "parallel.dp=null", "--nproc", "5000"),
    "context parallel": ("train", "recipe.yaml", "parallel.cp=2"),
    "longer than every cap": ("train", "recipe.yaml", "plugins.packing.max_tokens=64", "plugins.packing.slices=off"),
    "a trace in no folder": ("train", "recipe.yaml", "--trace", "no/such/folder/t.json"),
    "empty data": ("train", "recipe.yaml", "data.source=empty.jsonl"),
    "corrupt data": ("verify", "recipe.yaml", "data.source=corrupt.jsonl"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_exit_with_2_and_write_nothing(name: str, place: Path) -> None:
    (place / "zero.txt").write_text("5\n0\n7\n")
    (place / "damaged" / "acme").mkdir(parents=True, exist_ok=True)
    (place / "damaged" / "acme" / "status.json").write_text('{"name": "acme", "state": "lost"}')
    (place / "empty.jsonl").write_text("")
    (place / "corrupt.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    before = sorted(p.name for p in place.iterdir())
    done = command(place, *WRONG[name])
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr) > 20
    assert sorted(p.name for p in place.iterdir()) == before


def test_a_script_of_deepspeed_needs_no_accelerate(place: Path) -> None:
    (place / "deepspeed.yaml").write_text("trainer: deepspeed\nplugins: {packing: {enabled: true}}\n")
    code = (
        "import sys, importlib.metadata as m; listed = m.version\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'accelerate': raise ModuleNotFoundError(name)\n"
        "def version(name):\n"
        "    if name == 'accelerate': raise m.PackageNotFoundError(name)\n"
        "    return listed(name)\n"
        "sys.meta_path.insert(0, Hidden()); m.version = version\n"
        "import evenload\n"
        "print(sorted({(s.row.name, s.state) for s in evenload.enable('deepspeed.yaml').table()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "('transformers.prepare', 'skipped')" in done.stdout
    assert "('deepspeed.step', 'pending')" in done.stdout


def test_shipped_recipes_are_listed_and_planned_by_name(place: Path, bare: Callable[..., Done]) -> None:
    rows = {row["name"]: row for row in answer(bare(place, "recipes", "--json"))["recipes"]}
    assert [rows["gpu-node"][key] for key in ("trainer", "ranks", "plugins")] == ["megatron", 8, ["packing"]]
    table = bare(place, "recipes")
    assert all(name in table.stdout for name in rows)
    assert answer(bare(place, "plan", "gpu-node", "--lengths", "lengths.txt", "--json"))["layout"]["dp"] == 8


def test_an_unsupported_version_is_named(place: Path) -> None:
    commands = Commands(
        "import importlib.metadata as metadata; installed = metadata.version\n"
        "metadata.version = lambda name: '0.13.0' if name == 'megatron-core' else installed(name)"
    )
    done = commands(place, "train", "recipe.yaml")
    commands.close()
    assert done.returncode == 2
    assert "megatron-core 0.13.0; supported:" in done.stderr


def test_importing_the_package_loads_nothing_heavy(place: Path) -> None:
    code = "import sys, evenload; print([m for m in ('torch', 'numpy', 'pydantic', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_refuses_a_second_name() -> None:
    """Imported as a top-level package, a folder would bring a second registry."""
    code = """
import sys
for name in sys.argv[1:]:
    try:
        __import__(name)
    except ImportError as error:
        print(error)
"""
    folders = ("core", "plugins", "runtime", "data", "integrations", "patches", "training", "commands")
    done = subprocess.run([sys.executable, "-c", code, *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [f"import this package as evenload.{name}" in done.stdout for name in folders] == [True] * len(folders)


@pytest.mark.slow
def test_the_packages_listed_are_the_packages_there_are() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    hidden = (".", "tests", "build", "docs", "benchmarks")
    found = {
        ".".join(("evenload", *path.parent.relative_to(ROOT).parts))
        for path in ROOT.rglob("__init__.py")
        if not any(part.startswith(hidden) for part in path.relative_to(ROOT).parts)
    }
    assert set(listed) == found
