"""Benchmarks as tests run them: scripts in forks of a process that has imported a trainer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evenload
import pytest

BENCHMARKS = Path(evenload.__file__).parent / "benchmarks"
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def ran(scripted: Callable[..., Done], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    """``ran("planning/mesh.py", *words, ranks=1, folder=None)``: a script that ended well, in this folder or a new one.

    With ``ranks=2`` a script that would start itself by torchrun (`frame.started`) is what its ranks are.
    """

    def run(
        script: str,
        *words: object,
        ranks: int = 1,
        folder: Path | None = None,
        trainer: str = "megatron",
        planted: str = "",
    ) -> Done:
        place = folder or tmp_path_factory.mktemp("benchmark")
        path = BENCHMARKS / script
        beside = f"import sys\nsys.path.append({str(path.parent)!r})\n{planted}"
        done = scripted(trainer, place, path, *words, ranks=ranks, planted=beside)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    return run


@pytest.fixture(scope="session")
def benchmark(ran: Callable[..., Done], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``benchmark("planning/mesh.py", "--quick")``: what a script prints with --json, and writes with --out."""

    def result(script: str, *words: object, **how: Any) -> Any:
        out = tmp_path_factory.mktemp("benchmark") / "out.json"
        said = json.loads(ran(script, *words, "--json", "--out", out, **how).stdout)
        assert said == json.loads(out.read_text())
        return said

    return result
