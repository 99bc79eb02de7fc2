"""The notebooks run from their first cell to their last, as a newcomer's Jupyter runs them, and keep no outputs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import evenload
import pytest
from harness.cases import full

NOTEBOOKS = sorted((Path(evenload.__file__).parent / "examples" / "notebooks").glob("*.ipynb"))
FAULTS = ("Traceback", "\n  do: ", "command not found")
"""What a command of a cell says that failed; its cell goes on."""


def printed(cell: Any) -> str:
    return "".join(str(output.get("text", "")) for output in cell.get("outputs", ()))


@full
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("EVENLOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    said = {cell.source: printed(cell) for cell in cells}
    assert not [text for text in said.values() if any(fault in text.replace("\r", "") for fault in FAULTS)]
    commands = [source for source in said if source.startswith("!")]
    assert len(commands) >= 2
    assert all("predicted" in said[source] or "tokens/s" in said[source] for source in commands), said


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
