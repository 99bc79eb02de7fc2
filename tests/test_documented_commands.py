"""Every command of the README, the documents and the recipes is one that evenload takes.

Commands that only plan are run. Those that train are checked as they are asked for, up to the start of the ranks, and
``RUN_BY`` names the test that trains what they ask for, on a small model. What needs a cluster says so (``torchrun`` or
a recipe for GPUs) and is checked alike.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import evenload
import pytest
from evenload import cli
from evenload.api import load_recipe
from harness.cases import only_full
from harness.commands import Done
from harness.commands import command as in_process

ROOT = Path(evenload.__file__).parent
PAGES = (
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "tests" / "README.md"),
    *sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/results/*.md")]),
)
TOOLS = ("evenload", "make", "python", "torchrun")

NOT_RUN = {
    "pip": "installs into the reader's environment; `test_wheel.py` builds the wheel and looks its extras up",
    "torchrun": "trains a script of the reader's; with `-m evenload` it is asked for as `evenload` is",
    "printf": "writes the recipe that `test_every_recipe_that_a_page_writes_is_read` reads",
    "find": "lists the lengths of files of this machine, for one who has no file of lengths",
    **dict.fromkeys(
        ("#SBATCH", "srun", "code=$?", "[", "exit"),
        "lines of examples/slurm, which `test_cluster_examples.py` runs with stand-ins for srun and scontrol",
    ),
}
"""First words of documented lines that no test runs as they stand, and why."""

RUN_BY = {
    ("train", "megatron"): "commands/test_train.py::test_against_trains_each_variant_on_equal_batches",
    (
        "train",
        "deepspeed",
    ): "commands/test_train.py::test_resume_is_bit_equal_and_passes_over_a_checkpoint_with_one_flipped_bit",
    ("verify", "megatron"): "commands/test_verify.py::test_every_layout_is_exact",
    ("verify", "deepspeed"): "commands/test_verify.py::test_every_layout_is_exact",
    ("bench", "megatron"): "test_public_surface.py::test_results_of_training_have_all_their_keys",
    ("profile", "megatron"): "commands/test_profile.py::test_profile_measures_a_real_trainer",
    ("check", "megatron"): "commands/test_check.py::test_a_step_of_megatron_is_checked_and_nothing_is_trained",
    ("check", "transformers"): "commands/test_check.py::test_a_step_of_the_trainer_is_checked_under_its_own_launcher",
    ("audit", "transformers"): "plugins/audit/test_audit.py::test_a_wrong_script_is_wrong_before_its_update",
    (
        "run",
        "transformers",
    ): "commands/test_run.py::test_an_unmodified_script_of_the_trainer_is_planned_to_its_end_under_accelerate",
    ("run", "megatron"): "commands/test_run.py::test_a_process_that_does_not_import_the_trainer_is_left_alone",
}


def joined(lines: list[str]) -> Iterator[str]:
    """Commands of some lines, those that end in a backslash joined, comments and remarks behind them left out."""
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    for line in text.splitlines():
        command = re.split(r"\s{2,}[(#]", line.strip(), maxsplit=1)[0]
        if command.split(" ")[0] in TOOLS:
            yield re.sub(r"\s+", " ", command)


def commands_of_page(text: str) -> Iterator[str]:
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in ("", "sh", "bash"):
            yield from joined(block.splitlines())
    yield from joined(re.findall(r"^    (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE))


def commands_of_recipe(text: str) -> Iterator[str]:
    yield from joined([line.removeprefix("#").strip() for line in text.partition("\n#\n")[0].splitlines()])


DOCUMENTED = sorted(
    {command for page in PAGES for command in commands_of_page(page.read_text())}
    | {command for path in (ROOT / "recipes").glob("*.yaml") for command in commands_of_recipe(path.read_text())}
)
INLINE = sorted(
    {span for page in PAGES for span in re.findall(r"`((?:evenload|make|python) [^`]+)`", page.read_text())}
)
"""Commands inside sentences and tables."""
SYNOPSES = [c for c in DOCUMENTED if re.search(r"\bRECIPE\b|\||\[", c)]
ASKED = [c.partition("-m ")[2] if c.startswith("torchrun") else c for c in DOCUMENTED if c not in SYNOPSES]
ASKED = sorted({c for c in ASKED if c.startswith("evenload ")})
PLANS = [c for c in ASKED if c.startswith(("evenload plan", "evenload plugins", "evenload search", "evenload env"))]
DEAR = ("--measure", "--steps 4", "parallel.dp=16", "--sweep parallel.cp")
"""Words of plans that take longer than some seconds."""
READS = [c for c in ASKED if c.startswith(("evenload lora", "evenload watch"))]
TRIES_GPUS = [c for c in ASKED if "--gpu" in c]
COMPARES = [c for c in ASKED if c.startswith("evenload compare")]
TRAINS = [c for c in ASKED if c not in (*PLANS, *READS, *TRIES_GPUS, *COMPARES)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that documented commands read."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    shutil.copy(ROOT / "recipes" / "quickstart.yaml", folder / "recipe.yaml")
    shutil.copy(ROOT / "recipes" / "costs" / "cpu-2-stages.yaml", folder / "costs.yaml")
    rows = [json.dumps({"text": "a" * (40 + 13 * k % 900)}) for k in range(200)]
    (folder / "long_tail.jsonl").write_text("\n".join(rows) + "\n")
    lengths = [16 + (k * k * 37) % 3000 + (20000 if k % 97 == 0 else 0) for k in range(1200)]
    (folder / "lengths.txt").write_text("".join(f"{length}\n" for length in lengths))
    groups = [{"prompt": 300 + 9 * k, "completions": [32 + 53 * (k + i) % 900 for i in range(16)]} for k in range(40)]
    (folder / "groups.jsonl").write_text("".join(f"{json.dumps(group)}\n" for group in groups))
    (folder / "runs" / "lora" / "asyncio").mkdir(parents=True)
    status = {"name": "asyncio", "state": "training", "step": 3, "steps": 80}
    (folder / "runs" / "lora" / "asyncio" / "status.json").write_text(json.dumps(status))
    (folder / "runs" / "a").mkdir()
    numbers = {"tokens": 100, "step_s": 0.5, "plan_s": 0.01, "plan_wait_s": 0.0, "predicted_s": 0.25, "imbalance": 1.25}
    row = {"step": 0, **numbers, "padding_frac": 0.0, "bubble_frac": 0.0, "loss": 4.25, "of_steps": 1, "ends": "done"}
    (folder / "runs" / "a" / "log.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def blocks_of(text: str) -> Iterator[str]:
    """Blocks of a page that a reader types: those without a language, or of a shell's."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in ("", "sh", "bash"):
            yield re.sub(r"\\\n\s*", " ", block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_line_that_a_reader_types_is_tested_or_says_why_not(page: Path) -> None:
    lines = [line.strip() for block in blocks_of(page.read_text()) for line in block.splitlines() if line.strip()]
    assert not [line for line in lines if line.split()[0] not in (*TOOLS, *NOT_RUN) and not line.startswith("# ")]


def test_every_recipe_that_a_page_writes_is_read(tmp_path: Path) -> None:
    written = {text for page in PAGES for text in re.findall(r"^printf '(.*)' > recipe.yaml$", page.read_text(), re.M)}
    assert written
    for text in written:
        (tmp_path / "recipe.yaml").write_text(text.replace("\\n", "\n"))
        assert load_recipe(tmp_path / "recipe.yaml").plugins


@pytest.mark.every_plugin
def test_a_command_inside_a_sentence_names_what_there_is() -> None:
    import typer

    group: Any = typer.main.get_command(cli.app)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wrong = []
    for command in INLINE:
        tool, first, *words = " ".join(command.split()).split(" ")
        if tool == "make":
            wrong += [] if first in targets else [command]
        elif tool == "python":
            wrong += [] if first.startswith("-") or (ROOT / first).exists() else [command]
        elif re.fullmatch(r"[a-z]+", first):
            known = (
                {option for one in group.commands[first].params for option in one.opts}
                if first in group.commands
                else set()
            )
            own = words[: words.index("--")] if "--" in words else words
            asked = {word.partition("=")[0] for word in own if word.startswith("--")}
            wrong += [] if first in group.commands and asked <= known else [command]
    assert len(INLINE) > 100
    assert not wrong


def test_there_are_commands_to_be_checked() -> None:
    assert len(PLANS) >= 3
    assert len(TRAINS) > 15
    assert len(SYNOPSES) > 5


def run(command: str, place: Path) -> Done:
    return in_process(place, *shlex.split(command)[1:])


@pytest.mark.slow
@pytest.mark.parametrize("command", [only_full(c) if any(word in c for word in DEAR) else c for c in PLANS])
def test_a_command_that_plans_runs(command: str, place: Path) -> None:
    done = run(command, place)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", READS)
def test_a_command_that_reads_what_a_job_wrote_runs(command: str, place: Path) -> None:
    done = run(command, place)
    assert done.returncode == 0, done.stderr
    assert {"lora": "asyncio", "watch": "4.25"}[shlex.split(command)[1]] in done.stdout


def test_commands_that_compare_files_run(tmp_path: Path) -> None:
    """What people are to judge is written first, and they judge it."""
    (tmp_path / "my_judges.py").write_text("def helpful(prompt, first, second): return float(first > second)")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Why?"}\n' * 60)
    for name in "ab":
        rows = [json.dumps({"prompt": n, "text": f"{name if n % 3 else 'because'} {n} {name}"}) for n in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    sheet = tmp_path / "sheet.jsonl"
    for command in sorted(COMPARES, key=lambda command: "--people" in command):
        done = run(command, tmp_path)
        assert done.returncode == 0, done.stderr
        if sheet.exists():
            sheet.write_text(sheet.read_text().replace('"verdict": null', '"verdict": "tie"'))
    assert len(COMPARES) == 3
    assert "corrected by people" in done.stdout
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("command", TRIES_GPUS)
def test_a_command_that_tries_gpus_out_asks_for_one(command: str, place: Path) -> None:
    done = run(command, place)
    assert done.returncode == 2
    assert "there is no GPU here" in done.stderr


@pytest.mark.parametrize("command", TRAINS)
def test_a_command_that_trains_is_a_right_request(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is checked that is checked before ranks start; then ranks would start."""
    import evenload.commands.check as checker
    import evenload.commands.run as runner
    import evenload.plugins.audit.verb as auditor
    import evenload.training.launching.launch as launcher

    verdict: dict[str, Any] = {"verdict": "planned", "says": "", "plugins": [], "refusals": [], "step": None}
    started: list[Any] = []
    monkeypatch.setattr(launcher, "launch", lambda *words: started.append(words))
    monkeypatch.setattr(runner, "run", lambda *words, **_: started.append(words) or 0)
    monkeypatch.setattr(auditor, "judged", lambda *words: started.append(words) or {**verdict, "verdict": "right"})
    monkeypatch.setattr(checker, "check", lambda *words: started.append(words) or verdict)
    done = run(command, place)
    assert done.returncode == 0, done.stderr
    assert started or shlex.split(command)[1] in ("doctor", "plugins", "schema")


@pytest.mark.parametrize("command", TRAINS)
def test_a_command_that_trains_is_run_by_a_test(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, recipe, *words = shlex.split(command)[1:]
    monkeypatch.chdir(place)
    changes = [word for word in words[: words.index("--")] if "=" in word] if "--" in words else words
    overrides = [word for word in changes if "=" in word and not word.startswith("-")]
    file, _, test = RUN_BY[verb, load_recipe(recipe, overrides).trainer].partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("command", SYNOPSES)
@pytest.mark.every_plugin
def test_options_of_a_synopsis_exist(command: str) -> None:
    import typer

    group: Any = typer.main.get_command(cli.app)
    for verb in re.findall(r"\w+", re.split("RECIPE|CHECKPOINT|RUN|DIR", command.partition(" ")[2])[0]):
        options = {option for parameter in group.commands[verb].params for option in parameter.opts}
        assert set(re.findall(r"--\w+", command)) <= options


def test_targets_and_scripts_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [shlex.split(command, comments=True) for command in DOCUMENTED]
    assert not [words[1] for words in asked if words[0] == "make" and words[1] not in targets]
    scripts = {words[1] for words in asked if words[0] == "python" and words[1] != "-c"}
    assert len(scripts) > 5
    assert not [script for script in scripts if not (ROOT / script).exists()]
    folders = (ROOT / "tests" / "benchmarks").rglob("*.py"), (ROOT / "tests" / "hosts").glob("test_*.py")
    tested = "".join(path.read_text() for paths in folders for path in paths)
    assert not [script for script in scripts if Path(script).stem not in tested]
