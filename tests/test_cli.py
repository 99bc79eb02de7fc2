"""The verbs that need no trainer, as a user runs them, also where torch cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import evenload
import numpy as np
import pytest
from evenload.core.plan_json import read_plans
from harness.commands import Commands, Done, command

ROOT = Path(evenload.__file__).parent
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


def test_plan_and_doctor_work_without_torch(place: Path, bare: Callable[..., Done]) -> None:
    done = bare(place, "plan", "recipe.yaml", "--lengths", "lengths.txt", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"][0]["imbalance"] >= 1
    done = bare(place, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
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
    done = bare(place, "plan", "recipe.yaml", *settings, "--json", "--out", "t.json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["tenants"]
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
        assert done.returncode == 0, done.stderr
        assert "70 lengths of d.jsonl, taken in " in done.stderr
        assert json.loads(done.stdout)["samples"] == 70
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
    done = command(place, "plan", "recipe.yaml", "trainer=transformers", "--lengths", "lengths.txt", "--json")
    assert done.returncode == 0, done.stderr
    (step,) = json.loads(done.stdout)["steps"]
    assert step["micro_batches"] % 8 == 0, "every rank runs as many"


def test_plan_reports_what_the_readme_promises_and_anyone_can_check_what_it_writes(place: Path) -> None:
    """Coverage and caps of plan.json, without our code."""
    words = ("--lengths", "lengths.txt", "--steps", "3", "--json", "--out", "plan.json")
    done = command(place, "plan", "recipe.yaml", *words)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["steps"]) == 3
    for step in result["steps"]:
        assert {"plan_s", "step_s", "bound_s", "imbalance", "padding_frac", "bubble_frac", "baselines"} <= set(step)
        assert {"micro_batch_imbalance", "peak_bytes", "delay_steps", "notes"} <= set(step)
        assert min(step["micro_batch_imbalance"].values()) >= 1.0
        assert step["peak_bytes"] > 0
        assert set(step["baselines"]) == {"padded", "whole", "chunks", "in_order", "best_fit", "karmarkar_karp"} | {
            *("dp_balanced", "group_by_length", "token_budget")
        }
        assert step["bound_s"] <= step["step_s"] <= min(b["step_s"] for b in step["baselines"].values()) * 1.0001
    for step in json.loads((place / "plan.json").read_text())["steps"]:
        covered = [[0] * length for length in step["lengths"]]
        for micro_batch in step["micro_batches"]:
            assert sum(stop - start for _, start, stop in micro_batch["slices"]) <= step["max_tokens"]
            assert all(0 <= rank < step["num_ranks"] for rank in micro_batch["ranks"])
            for sequence, start, stop in micro_batch["slices"]:
                for token in range(start, stop):
                    covered[sequence][token] += 1
        assert all(set(tokens) == {1} for tokens in covered)


def test_plan_explains_what_every_rank_runs(place: Path) -> None:
    asked = ("plan", "recipe.yaml", "--lengths", "lengths.txt", "--explain")
    done = command(place, *asked, "--json")
    assert done.returncode == 0, done.stderr
    (step,) = json.loads(done.stdout)["steps"]
    cells = " ".join(step["program"]).split()
    assert {f"{kind}{i}" for kind in "FB" for i in range(step["micro_batches"])} <= set(cells)
    told = command(place, *asked)
    assert told.returncode == 0, told.stderr
    assert step["program"][1] in told.stdout


def test_cut_plans_are_written_with_their_order_and_both_groupings(place: Path) -> None:
    settings = ("plugins.packing.max_tokens=2048", "data.max_length=8192", "train.recompute=true")
    lengths = np.random.default_rng(0).lognormal(6.8, 0.6, 4000).astype(int) + 1
    (place / "long.txt").write_text("\n".join(map(str, lengths)) + "\n")
    done = command(place, "plan", "recipe.yaml", "--lengths", "long.txt", *settings, "--out", "cut.json")
    assert done.returncode == 0, done.stderr
    (step,) = json.loads((place / "cut.json").read_text())["steps"]
    for groups in (step["micro_batches"], step["backward"]):
        tokens = sorted(tuple(piece) for micro_batch in groups for piece in micro_batch["slices"])
        assert sum(stop - start for _, start, stop in tokens) == sum(step["lengths"])
        assert all(sum(b - a for _, a, b in m["slices"]) <= 2048 for m in groups)
    kinds = [kind for kind, _ in step["order"][0]]
    assert kinds.count("F") == len(step["micro_batches"])
    assert kinds.count("B") == len(step["backward"]) > len(step["replayed"]) - 1 > 0


def test_tenants_of_a_job_are_listed_without_torch(place: Path, bare: Callable[..., Done]) -> None:
    out = place / "adapters" / "out"
    for name, more in (
        ("acme", '"state": "training", "step": 3, "loss": 2.5'),
        ("zenith", '"state": "failed", "step": 0'),
    ):
        (out / name).mkdir(parents=True)
        (out / name / "status.json").write_text(f'{{"name": "{name}", "steps": 40, {more}}}')
    for folder in ("adapters", "adapters/out"):
        done = bare(place, "lora", folder, "--json")
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)["tenants"]
        assert [(row["name"], row["state"], row["step"], row["loss"]) for row in rows] == [
            ("acme", "training", 3, 2.5),
            ("zenith", "failed", 0, None),
        ]
    table = bare(place, "lora", "adapters").stdout
    assert "zenith" in table
    assert "3 of 40" in table


WRONG = {
    "no folder of tenants": ("lora", "nothing"),
    "a folder without tenants": ("lora", "."),
    "a damaged status": ("lora", "damaged"),
    "no such recipe": ("plan", "nothing.yaml", "--lengths", "lengths.txt"),
    "no such lengths": ("plan", "recipe.yaml", "--lengths", "nothing.txt"),
    "unknown key": ("plan", "recipe.yaml", "--lengths", "lengths.txt", "train.stepz=3"),
    "zero length": ("plan", "recipe.yaml", "--lengths", "zero.txt"),
    "too few samples": ("plan", "recipe.yaml", "--lengths", "lengths.txt", "train.global_batch_size=100000"),
    "cap below the longest": (
        *("plan", "recipe.yaml", "--lengths", "lengths.txt"),
        *("plugins.packing.max_tokens=1000", "plugins.packing.slices=off"),
    ),
    "cap below a block": ("plan", "recipe.yaml", "--lengths", "lengths.txt", "plugins.packing.max_tokens=3"),
    "no room for keys": (
        *("plan", "recipe.yaml", "--lengths", "lengths.txt"),
        *("plugins.packing.max_tokens=256", "plugins.packing.activation_gib=0.0001"),
    ),
    "no room in training": (
        *("train", "recipe.yaml", "plugins.packing.max_tokens=64"),
        "plugins.packing.activation_gib=0.00001",
    ),
    "unwritable out": ("plan", "recipe.yaml", "--lengths", "lengths.txt", "--out", "no/such/folder/plan.json"),
    "unknown cluster": ("plan", "recipe.yaml", "--lengths", "lengths.txt", "cluster=moon"),
    "unknown costs": ("plan", "recipe.yaml", "--lengths", "lengths.txt", "costs=moon"),
    "unknown command": ("plane",),
    "unknown option": ("plan", "recipe.yaml", "--lenghts", "lengths.txt"),
    "unknown baseline": ("bench", "recipe.yaml", "--against", "inorder"),
    "data not there": ("train", "recipe.yaml", "data.source=nothing.jsonl"),
    "wrong number of ranks": ("train", "recipe.yaml", "--nproc", "3"),
    "no number of ranks": ("search", "recipe.yaml", "--lengths", "lengths.txt", "--nproc", ""),
    "no ranks": ("plan", "recipe.yaml", "--lengths", "lengths.txt", "--nproc", "0"),
    "more ranks than samples": ("plan", "recipe.yaml", "--lengths", "lengths.txt", "parallel.dp=null", "--nproc", "65"),
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
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
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
    done = bare(place, "recipes", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["recipes"]}
    assert {key: rows["gpu-node"][key] for key in ("trainer", "ranks", "plugins")} == {
        "trainer": "megatron",
        "ranks": 8,
        "plugins": ["packing"],
    }
    table = bare(place, "recipes")
    assert all(name in table.stdout for name in rows)
    done = bare(place, "plan", "gpu-node", "--lengths", "lengths.txt", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layout"]["dp"] == 8


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


def test_the_public_face_is_what_it_says() -> None:
    assert sorted(evenload.__all__) == evenload.__all__
    assert all(getattr(evenload, name) is not None for name in evenload.__all__)
    assert set(evenload._HOMES) | {"__version__"} == set(evenload.__all__)


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
