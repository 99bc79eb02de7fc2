"""What is installed is whole: the wheel holds every file that code opens, and names in messages are names there are."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import evenload
import pytest
import yaml
from evenload import cli
from evenload.core.recipe.traits import TRAINERS
from harness.commands import Commands
from harness.product import ROOMS, ROOT, trees

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
LISTENING = """
import sys
opened = open({log!r}, "a", buffering=1)
def note(event, args):
    if event == "open" and str(args[0]).startswith({inside!r}):
        print(args[0], file=opened)
sys.addaudithook(note)
"""
"""Writes down each file below some folders that the process opens."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build writes beside its sources."""
    source, out = tmp_path_factory.mktemp("wheel") / "source", tmp_path_factory.mktemp("built")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "tests", "benchmarks", "docs")
    shutil.copytree(ROOT, source, ignore=left_out)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, out], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return next(out.glob("*.whl"))


Opened = Callable[[Path, str], list[str]]


@pytest.fixture(scope="module")
def opened_by(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """Files of evenload that a command opens in a folder, below the wheel's first; it runs from the wheel alone."""
    installed, log = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("opened") / "log"
    zipfile.ZipFile(wheel).extractall(installed)
    surroundings = {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    commands = Commands(LISTENING.format(log=str(log), inside=(str(installed), str(ROOT))), surroundings)

    def opened(place: Path, command: str) -> list[str]:
        before = len(log.read_text()) if log.exists() else 0
        done = commands(place, *shlex.split(command))
        assert done.returncode == 0, done.stderr
        files = log.read_text()[before:].splitlines()
        # A virtual environment may lie in the checkout.
        return [one.replace(str(installed), "WHEEL") for one in files if not one.startswith(sys.prefix)]

    yield opened
    commands.close()


def test_the_wheel_holds_what_the_rooms_hold(wheel: Path) -> None:
    files = {path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()} | set(ROOT.glob("*.py"))
    kept = {path for path in files if "__pycache__" not in path.parts and not path.name.startswith(".")}
    wanted = {f"evenload/{path.relative_to(ROOT)}" for path in [*kept, ROOT / "py.typed"]}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if not re.match(r"evenload-[\d.]+\.dist-info/", name)} == wanted
    assert f"evenload-{evenload.__version__}.dist-info/METADATA" in names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "opens"),
    [
        ("recipes", "recipes/gpu-node.yaml"),
        ("schema", "core/recipe/recipe"),
        ("env quickstart", "recipes/quickstart.yaml"),
        ("plan recipes/quickstart.yaml --lengths lengths.txt --report report.html", "plugins/report/page.html"),
        ("plan quickstart cluster=h200 costs=verl-7b --lengths lengths.txt", "recipes/costs/verl-7b.yaml"),
        ("plan lora", "recipes/tenants/asyncio.yaml"),
    ],
)
def test_a_command_of_the_wheel_opens_nothing_of_a_checkout(
    command: str, opens: str, opened_by: Opened, tmp_path: Path
) -> None:
    (tmp_path / "lengths.txt").write_text("".join(f"{20 + k * 37 % 900}\n" for k in range(200)))
    opened = opened_by(tmp_path, command)
    assert [one for one in opened if opens in one]
    assert [one for one in opened if not one.startswith("WHEEL/")] == []


@functools.cache
def messages() -> list[tuple[str, str]]:
    """Every string of the product, where it stands; what an f-string fills in is left out."""
    return [
        (f"{path}:{node.lineno}", node.value)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def documents() -> Iterator[tuple[str, str]]:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")]:
        if path.suffix in (".md", ".py", ".yaml", ".sbatch"):
            yield str(path.relative_to(ROOT)), path.read_text()


@pytest.mark.slow
def test_extras_that_are_named_exist() -> None:
    named = {
        (extra, place)
        for place, text in (*messages(), *documents())
        for extras in re.findall(r"(?:evenload|'\.|\.whl|  # )\[([\w,]+)\]", text)
        for extra in extras.split(",")
    }
    assert {extra for extra, _ in named} >= {"solver", "megatron"}
    assert {(extra, place) for extra, place in named if extra not in EXTRAS} == set()
    assert set(TRAINERS) <= EXTRAS  # `training.hosts` names the extra of a trainer


@pytest.mark.slow
def test_commands_that_are_named_exist() -> None:
    import typer

    group: Any = typer.main.get_command(cli.app)
    named = {(verb, place) for place, text in messages() for verb in re.findall(r"`evenload (\w[\w-]*)", text)}
    assert {verb for verb, _ in named} >= {"profile", "run", "train"}
    assert {(verb, place) for verb, place in named if verb not in group.commands} == set()


@pytest.mark.every_plugin
def test_packages_that_are_to_be_installed_belong_to_an_extra() -> None:
    rows = [*PROJECT["dependencies"], *(row for rows in PROJECT["optional-dependencies"].values() for row in rows)]
    known = {re.split(r"[<>=\[]", row)[0] for row in rows}
    named = {(name, place) for place, text in messages() for name in re.findall(r"pip install '?([\w-]+)", text)}
    assert {name for name, _ in named} >= {"PuLP", "peft"}
    assert {(name, place) for name, place in named if name not in known | {"evenload"}} == set()


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def test_the_image_installs_the_wheel_with_extras_that_exist() -> None:
    steps = instructions()
    assert {word for word, _ in steps} == {"FROM", "WORKDIR", "COPY", "RUN", "ARG", "CMD"}
    values = dict(rest.split("=") for word, rest in steps if word == "ARG")
    assert set(values["EXTRAS"].split(",")) <= EXTRAS
    runs = [rest for word, rest in steps if word == "RUN"]
    for run in runs:
        subprocess.run(["bash", "-n"], input=run, text=True, check=True)
    assert set(re.findall(r"\$(\w+)", " ".join(runs))) == set(values)
    (torch,) = [row for row in PROJECT["optional-dependencies"]["megatron"] if row.startswith("torch")]
    assert f'"{torch}"' in runs[-2]
    assert "/wheels/evenload-*.whl" in runs[-1]
    stages = [re.match(r"(\S+)(?: AS (\w+))?$", rest) for word, rest in steps if word == "FROM"]
    version = re.search(r":(\d+\.\d+)-", stages[-1][1])  # type: ignore[index]
    assert version is not None
    assert tuple(map(int, version[1].split("."))) >= (3, 11)
    assert json.loads(next(rest for word, rest in steps if word == "CMD"))[0] in PROJECT["scripts"]


def test_what_is_ignored_by_git_and_large_stays_out_of_the_image() -> None:
    assert {".git", ".venv*", "build", "dist"} <= set((ROOT / ".dockerignore").read_text().split())


@pytest.mark.slow
def test_a_tag_releases_its_own_version_and_nothing_untried() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert flow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` so
    build, publish = flow["jobs"]["build"], flow["jobs"]["publish"]
    scripts = [step["run"] for step in build["steps"] if "run" in step]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    tag = os.environ | {"GITHUB_REF_NAME": f"v{evenload.__version__}"}
    assert subprocess.run(["bash", "-c", scripts[0]], cwd=ROOT, env=tag, capture_output=True).returncode == 0
    tag["GITHUB_REF_NAME"] = "v99.0.0"
    assert subprocess.run(["bash", "-c", scripts[0]], cwd=ROOT, env=tag, capture_output=True).returncode == 1
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}


@pytest.mark.slow
def test_a_pull_request_is_checked_by_targets_that_exist() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())
    assert "pull_request" in flow[True]
    targets = " ".join(flow["jobs"]["make"]["strategy"]["matrix"]["targets"]).split()
    assert {"check", "test", "site"} <= set(targets)
    assert set(targets) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_on_an_index_the_readme_links_to_its_repository_and_so_does_the_package(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    repository = "https://example.org/them/evenload"
    script = [sys.executable, str(ROOT / ".github" / "for_index.py"), repository, "v1.2.3"]
    subprocess.run(script, cwd=tmp_path, check=True)
    readme = (tmp_path / "README.md").read_text()
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", readme)
    assert all(link.startswith(("https://", "#")) for _, link in links)
    here = [link.split("/v1.2.3/")[1].partition("#")[0] for _, link in links if link.startswith(repository)]
    assert len(here) > 20
    assert all((ROOT / path).exists() for path in here)
    assert f"({repository}/raw/v1.2.3/docs/run.svg)" in readme
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= set(urls)


def test_the_package_says_what_it_is_on_an_index() -> None:
    assert {"authors", "keywords", "classifiers", "description", "readme", "license"} <= set(PROJECT)
    assert not [line for line in PROJECT["classifiers"] if line.startswith("License")]  # `license` says it
