"""The example of a plugin from another package, installed as a stranger would install it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import evenload
import pytest
from harness.commands import Commands

EXAMPLE = Path(evenload.__file__).parent / "examples" / "third_party_plugin"
RECIPE = """
model: {num_layers: 4}
parallel: {dp: 2}
train: {global_batch_size: 12}
plugins: {packing: {enabled: true, max_tokens: 1024}, largest_first: {enabled: true}}
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """The command where pip has installed the example, from a copy of its sources."""
    folder = tmp_path_factory.mktemp("third_party")
    shutil.copytree(EXAMPLE, folder / "source")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
    pip = [sys.executable, "-m", "pip", "install", *offline, "--target", str(folder / "site")]
    done = subprocess.run([*pip, str(folder / "source")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    path = os.pathsep.join(filter(None, (str(folder / "site"), os.environ.get("PYTHONPATH", ""))))
    commands = Commands(environment={"PYTHONPATH": path})
    yield commands
    commands.close()


def test_the_example_is_short() -> None:
    assert len((EXAMPLE / "evenload_largest_first.py").read_text().splitlines()) < 60


@pytest.mark.every_plugin
def test_the_example_is_listed(command: Commands, tmp_path: Path) -> None:
    rows = json.loads(command(tmp_path, "plugins", "--json").stdout)["plugins"]
    assert {row["name"]: row["origin"] for row in rows}["largest_first"] == "evenload_largest_first"
    own = [row["name"] for row in rows if row["name"] != "largest_first"]
    assert own == ["data", "packing", "mesh", "pipeline", "lora", "moe"]


@pytest.mark.slow
def test_the_example_plans_and_its_section_is_checked(command: Commands, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    lengths = (100, 900, 300, 700, 200, 650, 80, 500, 40, 1000, 10, 60)
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
    ask = ("plan", "recipe.yaml", "--lengths", "lengths.txt", "--json", "--out", "plan.json")
    orders = {}
    for switch in ("false", "true"):
        done = command(tmp_path, *ask, f"plugins.largest_first.enabled={switch}", "plugins.packing.slices=off")
        assert done.returncode == 0, done.stderr
        assert ("largest_first" in json.loads(done.stdout)["plugins"]) == (switch == "true")
        rows = json.loads((tmp_path / "plan.json").read_text())["steps"][0]["micro_batches"]
        orders[switch] = [sum(stop - start for _, start, stop in row["slices"]) for row in rows]
    assert orders["true"] == sorted(orders["false"], reverse=True) != orders["false"]
    done = command(tmp_path, *ask, "plugins.largest_first.min_tokens=-1")
    assert done.returncode == 2
    assert "plugins.largest_first.min_tokens" in done.stderr


def test_the_plugin_of_the_page_plans() -> None:
    page = (Path(evenload.__file__).parent / "docs" / "architecture.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(code, "architecture.md", "exec"), {"__name__": "page"})
    try:
        settings = ["plugins.packing.slices=off", "plugins.shortest_first.enabled=true"]
        plan = evenload.plan(evenload.load_recipe("quickstart", settings), [900, 30, 500, 80, 700, 20, 60, 300])
    finally:
        evenload.unregister("shortest_first")
    sizes = [one.num_tokens for one in plan.micro_batches]
    assert sizes == sorted(sizes)
