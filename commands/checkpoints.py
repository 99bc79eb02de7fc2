"""Keep the last good checkpoint: a save that fails half-way on any rank leaves the previous one in force.

    root/step00000050.tmp/   written by all ranks
    root/step00000050/       renamed when every rank agrees that it worked; evenload.json lists its files and sizes
    root/latest              names it; replaced atomically

Trainers write into ``trainer/`` below. A leftover .tmp is removed by the next save of that step.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import RankError
from ..runtime.agreement import first_error

MANIFEST = "evenload.json"
LATEST = "latest"
_FORMAT = 1


def save(root: Path, step: int, state: dict[str, Any], write: Callable[[Path], None], rank: int, keep: int) -> Path:
    """Write a checkpoint with all ranks and commit it. ``write(directory)`` is the trainer's own saver. Collective.

    Raises:
        RankError: on every rank, if it failed on any; the last good checkpoint is untouched.
    """
    name = f"step{step:08d}"
    temporary = root / f"{name}.tmp"
    _together(lambda: _fresh(temporary / "trainer"), rank == 0, name, root)
    _together(lambda: write(temporary / "trainer"), True, name, root)
    _together(lambda: _commit(root, name, {"format": _FORMAT, "step": step, **state}, keep), rank == 0, name, root)
    return root / name


def last_good(root: Path) -> Path | None:
    """The checkpoint that ``latest`` names if it is whole, else the newest whole one; None if there is none."""
    if not root.is_dir():
        return None
    pointer = root / LATEST
    named = [pointer.read_text().strip()] if pointer.is_file() else []
    found = sorted((d.name for d in root.glob("step*") if not d.name.endswith(".tmp")), reverse=True)
    return next((root / name for name in [*named, *found] if name and _is_whole(root / name)), None)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `save` was given as state, with ``step``."""
    state: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text())
    return state


def _together(act: Callable[[], None], mine: bool, name: str, root: Path) -> None:
    """Act where it is this rank's turn, then end on every rank alike: all worked, or the same error everywhere."""
    error = None
    try:
        if mine:
            act()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"[:500]
    failures = first_error(error)
    if failures:
        good = last_good(root)
        raise RankError(
            f"the checkpoint {name} was not written",
            "; ".join(f"rank {rank}: {text}" for rank, text in failures[:3]),
            f"free space or repair the disk of {root}; the last good checkpoint is {good.name if good else 'none'}",
        )


def _fresh(directory: Path) -> None:
    shutil.rmtree(directory.parent, ignore_errors=True)
    directory.mkdir(parents=True)


def _commit(root: Path, name: str, state: dict[str, Any], keep: int) -> None:
    temporary, final = root / f"{name}.tmp", root / name
    files = {str(p.relative_to(temporary)): p.stat().st_size for p in sorted(temporary.rglob("*")) if p.is_file()}
    for file in files:
        _sync(temporary / file)
    _write(temporary / MANIFEST, json.dumps({**state, "files": files}))
    shutil.rmtree(final, ignore_errors=True)
    os.rename(temporary, final)
    _sync(root)
    _write(root / LATEST, name)
    for old in sorted(d for d in root.glob("step*") if not d.name.endswith(".tmp") and d != final)[
        : -(keep - 1) or None
    ]:
        shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    """Replace a small file so that a crash leaves either the old or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    _sync(part)
    os.replace(part, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_whole(checkpoint: Path) -> bool:
    try:
        files = read_state(checkpoint)["files"]
        return all((checkpoint / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False
