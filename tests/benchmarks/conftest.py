"""Benchmarks as tests run them: scripts in forks of a process that has imported a trainer."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evenload
import pytest
from rich.console import Console

BENCHMARKS = Path(evenload.__file__).parent / "benchmarks"
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def ran(scripted: Callable[..., Done], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    """``ran("planning/mesh.py", *words, ranks=1, folder=None)``: a script that ended well, in this folder or a new one.

    With ``ranks=2`` a script that would start itself by torchrun (`frame.started`) is what its ranks are.
    """

    def run(script: str, *words: object, folder: Path | None = None, trainer: str = "megatron", **how: Any) -> Done:
        path, planted = BENCHMARKS / script, how.pop("planted", "")
        next_to_it = f"import sys\nsys.path.append({str(path.parent)!r})\n{planted}"
        place = folder or tmp_path_factory.mktemp("benchmark")
        done = scripted(trainer, place, path, *words, planted=next_to_it, **how)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    return run


@pytest.fixture(scope="session")
def benchmark(ran: Callable[..., Done], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``benchmark("planning/mesh.py", "--quick")``: what a script writes with --out while it prints its table."""

    def result(script: str, *words: object, **how: Any) -> Any:
        out = tmp_path_factory.mktemp("benchmark") / "out.json"
        printed = ran(script, *words, "--out", out, **how).stdout
        written = json.loads(out.read_text())
        assert "predicted" in printed or not written.get("predicted")
        return written

    return result


@pytest.fixture(scope="session")
def shown() -> Callable[[Any], str]:
    """What a terminal shows of a table."""

    def text(table: Any) -> str:
        console = Console(file=io.StringIO(), width=160)
        console.print(table)
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    return text
