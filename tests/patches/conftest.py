"""A small host on disk, with every kind of symbol that a row can name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HOST = {
    "stubhost/__init__.py": "from .core import Engine, step\n",
    "stubhost/core.py": """
import math
def step(value, scale=1): return (value + 1) * scale
def twin(value): return value
class Base:
    def inherited(self, value): return value + 1
class Engine(Base):
    def run(self, value): return value + 1
    @staticmethod
    def make(value): return value + 1
    @classmethod
    def build(cls, value): return value + 1
TABLE = {"rate": "slow"}
ORIGINALS = {"step": step, "math": math, "run": Engine.__dict__["run"], "make": Engine.__dict__["make"],
             "build": Engine.__dict__["build"]}
""",
    "stubhost/late.py": "def f(value): return value + 1\nORIGINALS = {'f': f}\n",
    "stubscript.py": """
from stubhost import step
from stubhost.core import step as renamed
from stubhost.late import f
""",
    "stubhost-1.2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: stubhost\nVersion: 1.2.0\n",
}


@pytest.fixture
def host_folder(tmp_path: Path) -> Path:
    """A folder with the packages `stubhost` 1.2.0 and `stubscript`, which is not on the path yet."""
    for name, text in HOST.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def host(host_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The stub host made importable, and forgotten afterwards."""
    monkeypatch.syspath_prepend(str(host_folder))
    finders = list(sys.meta_path)
    yield host_folder
    assert sys.meta_path == finders, "an import hook was left behind"
    for name in [name for name in sys.modules if name.startswith(("stubhost", "stubscript", "stranger"))]:
        del sys.modules[name]
