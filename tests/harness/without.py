"""Take a plugin out of a copy of the tree, and hold the rest to what `make check` holds the whole to.

    python tests/harness/without.py mesh          (or `make without PLUGIN=mesh`)

In the copy pytest loads this module: a test that asks for the plugin, by a recipe, an import, a verb or a file, is
skipped there, and counted.
"""

from __future__ import annotations

import compileall
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = os.environ.get("EVENLOAD_WITHOUT", "")
"""The plugin that this tree lacks."""
VERBS = {"data": "score", "rollout": "generate"}
"""Verbs that are not called like their plugin."""


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark of tests that ask for plugins where no message says so, as where a command's is not looked at."""
    absent = [name for name in names if find_spec(f"evenload.plugins.{name}") is None]
    return pytest.mark.skipif(bool(absent), reason=f"needs plugins: {' '.join(absent)}")


def judged(report: Any, absent: str = ABSENT) -> Any:
    """The report, skipped where the test failed for what only an absent plugin gives: by what is said of a recipe's
    key, an import, a file, a verb or an option."""
    asked = rf"any other must be installed|No module named 'evenload\.plugins\.{absent}\b"
    asked += rf"|module 'evenload\.plugins' has no attribute '{absent}'"
    asked += rf"|['/]plugins/{absent}/[\w/]+\.py[':]|No such command '{VERBS.get(absent, absent)}'"
    asked += "|nobody draws what --" * (absent == "report")
    if absent and report.failed:
        text = "\n".join([report.longreprtext, *(part for _, part in report.sections)])
        if found := re.search(asked, text):
            report.outcome, report.longrepr = "skipped", (str(report.fspath), 0, found[0])
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    return judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    return judged((yield))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("every_plugin"):
            item.add_marker(pytest.mark.skip(reason="asks for every plugin"))


def copy_without(name: str, folder: Path) -> Path:
    """The tree in a folder, as the package ``evenload`` without a plugin, its tests and its rows in pyproject.toml."""
    tools = (".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "build", "runs", "*.egg-info")
    code = Path(shutil.copytree(ROOT, folder / "evenload", ignore=shutil.ignore_patterns(*tools)))
    for room in "plugins", "tests/plugins":
        shutil.rmtree(code / room / name)
    project = code / "pyproject.toml"
    of_plugin = rf'"[^"\n]*evenload\.plugins\.{name}\b[^"\n]*"'
    project.write_text(re.sub(rf"(?m)^{of_plugin} = .*\n|[ ]*{of_plugin},?\n?", "", project.read_text()))
    return code


def main(name: str) -> int:
    """What `make check` says of the copy."""
    with tempfile.TemporaryDirectory(prefix="without-") as folder:
        code = copy_without(name, Path(folder))
        compileall.compile_dir(code, quiet=2)  # the fuzz takes a later __pycache__ for a file that a command wrote
        (code / ".venv").mkdir()
        for path in Path(sys.prefix).iterdir():
            if path.name != "typed":  # a link to the checkout
                (code / ".venv" / path.name).symlink_to(path)
        paths, loaded = f"{folder}:{code}/tests", "-p harness.without"
        more = {"PYTHONPATH": paths, "PYTEST_ADDOPTS": loaded, "EVENLOAD_WITHOUT": name}
        return subprocess.run(["make", "check", "READY="], cwd=code, env=os.environ | more).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
