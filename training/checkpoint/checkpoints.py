"""Keep the last good checkpoint: a save that fails half-way on any rank leaves the previous one in force.

    root/step00000050.tmp/   written by all ranks
    root/step00000050/       renamed when every rank agrees that it worked; evenload.json lists its files (`manifest`)
    root/latest              names it; replaced atomically

Trainers write into ``trainer/`` below. A leftover .tmp is removed by the next save of that step. Before a checkpoint is
loaded all ranks together read every file of it once and compare its hash, each a part of the files, in threads: nothing
is given to a trainer, and nothing is unpickled, that is not what was written. One that is damaged is passed over,
loudly, for the newest older one that is whole.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ...core.errors import EvenloadError, RankError
from ...core.input import reading
from ...runtime import files
from ...runtime.files import File
from ...runtime.world.agreement import Group, everyone, first_error, from_first, rank_and_size
from . import manifest
from .manifest import Manifest

logger = logging.getLogger("evenload")
Result = TypeVar("Result")

LATEST = "latest"
_NAME = re.compile(r"step\d{8,}")
_LATEST_BYTES = 100
_SHOWN = 3
_DISK_FULL = "no space left"
_NOTHING_BYTES = 1 << 16
"""With less than this free a write that failed failed for want of space."""


def save(root: Path, step: int, state: dict[str, Any], write: Callable[[Path], None], keep: int) -> Path:
    """Write a checkpoint with all ranks and commit it. ``write(directory)`` is the trainer's own saver. Collective.

    Raises RankError on every rank if it failed on any; the last good checkpoint is untouched.
    """
    begin(root, step, write)
    return finish(root, step, state, None, keep)


def begin(root: Path, step: int, act: Callable[[Path], Result]) -> Result:
    """What ``act`` gives for the new directory of a checkpoint. Collective. Raises as `save`."""
    name, results = _name_of(step), list[Result]()
    directory = root / f"{name}.tmp" / "trainer"
    _together(lambda: _fresh(directory), rank_and_size()[0] == 0, name, root)
    _together(lambda: results.append(act(directory)), True, name, root)
    return results[0]


def finish(
    root: Path,
    step: int,
    state: dict[str, Any],
    write: Callable[[], None] | None,
    keep: int,
    group: Group = None,
) -> Path:
    """Commit what `begin` began, after a last ``write``. Collective over ``group``. Raises as `save`."""
    name = _name_of(step)
    temporary = root / f"{name}.tmp"
    stamps: dict[str, File] = {}
    if write is not None:
        _together(write, True, name, root, group)
    names = from_first(lambda: files.below(temporary), group)
    _together(lambda: stamps.update(files.stamp(temporary, _own_share(names))), True, name, root, group)
    for part in everyone(stamps, group):
        stamps.update(part)
    listed = Manifest({"step": step, **state}, stamps)
    _together(lambda: _commit(root, name, listed, keep), rank_and_size()[0] == 0, name, root, group)
    return root / name


def _name_of(step: int) -> str:
    return f"step{step:08d}"


def last_good(root: Path) -> Path | None:
    """The checkpoint that ``latest`` names, else the newest, whose files are all there; None if there is none."""
    for checkpoint in (root / name for name in _candidates(root)):
        listed = _readable(checkpoint)
        if isinstance(listed, Manifest) and not files.faults(checkpoint, listed.files, hashes=False):
            return checkpoint
    return None


def newest_whole(root: Path, *, verify: bool = True) -> tuple[Path, Manifest] | None:
    """The checkpoint to go on from, the same on every rank; None where there is none at all. Collective.

    ``verify`` compares the hash of every file, else sizes alone. Raises EvenloadError if all there are are damaged.
    """
    damaged: list[str] = []
    for name in from_first(lambda: _candidates(root)):
        outcome: Manifest | str = from_first(lambda name=name: _readable(root / name))  # type: ignore[misc]
        faults = [outcome] if isinstance(outcome, str) else _faults(root / name, outcome, hashes=verify)
        if not faults:
            assert isinstance(outcome, Manifest)
            if damaged:
                logger.warning("going on from the older checkpoint %s", name)
            if verify and not all(file.hash for file in outcome.files.values()):
                logger.warning("the checkpoint %s was written before evenload kept hashes: sizes alone agree", name)
            return root / name, outcome
        text = "; ".join(faults[:_SHOWN]) + (f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else "")
        logger.warning("the checkpoint %s is damaged and passed over: %s", name, text)
        damaged.append(f"{name}: {faults[0]}")
    if damaged:
        do = "restore one from a copy, or start anew with another checkpoint.dir (or checkpoint.resume=false)"
        raise EvenloadError(f"no checkpoint in {root} is whole", "; ".join(damaged[:_SHOWN]), do)
    return None


def require_whole(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint whose files are what was written, else EvenloadError. Collective."""
    outcome = from_first(lambda: _readable(checkpoint))
    faults = [outcome] if isinstance(outcome, str) else _faults(checkpoint, outcome, hashes=True)
    if faults or isinstance(outcome, str):
        do = "restore it from a copy, or take an older one"
        raise EvenloadError(f"the checkpoint {checkpoint} is damaged", "; ".join(faults[:_SHOWN]), do)
    return outcome


def _candidates(root: Path) -> list[str]:
    """Names of committed checkpoints, the one that ``latest`` names first, then from the newest to the oldest."""
    if not root.is_dir():
        return []
    names = sorted((d.name for d in root.iterdir() if d.is_dir() and _NAME.fullmatch(d.name)), reverse=True)
    try:
        named = reading.read_bytes(root / LATEST, _LATEST_BYTES, LATEST, "").decode("ascii", "replace").strip()
    except EvenloadError:
        return names
    if named not in names:
        logger.warning("%s names no checkpoint here: %.80r", root / LATEST, named)
        return names
    return [named, *(name for name in names if name != named)]


def _readable(checkpoint: Path) -> Manifest | str:
    """The manifest, or in words why there is none."""
    try:
        return manifest.read(checkpoint)
    except manifest.DamagedError as error:
        return error.found


def _faults(checkpoint: Path, listed: Manifest, *, hashes: bool) -> list[str]:
    """What is wrong with the files, found by all ranks together, each of which reads a part of them. Collective."""
    own = {name: listed.files[name] for name in _own_share(list(listed.files))}
    return [text for part in everyone(files.faults(checkpoint, own, hashes=hashes)) for text in part]


def _own_share(names: list[str]) -> list[str]:
    rank, size = rank_and_size()
    return sorted(names)[rank::size]


def _together(act: Callable[[], None], own_turn: bool, name: str, root: Path, group: Group = None) -> None:
    """Act where it is this rank's turn, then end on every rank alike: all worked, or the same error everywhere."""
    error = None
    try:
        if own_turn:
            act()
    except Exception as caught:
        error = _explained(caught, root)
    if failures := first_error(error, group):
        good = last_good(root)
        full = any(text.startswith(_DISK_FULL) for _, text in failures)
        what = f"the checkpoint {name} was not written" + (": the disk is full" if full else "")
        detail = "; ".join(f"rank {rank}: {text}" for rank, text in failures[:_SHOWN])
        kept = f"the last good checkpoint is {good.name if good else 'none'}"
        raise RankError(what, detail, f"{'free space on' if full else 'repair'} the disk of {root}; {kept}")


def _explained(error: BaseException, root: Path) -> str:
    """An error of a save in words; a full disk by that name, whatever the trainer made of it."""
    text = error.found if isinstance(error, EvenloadError) else f"{type(error).__name__}: {error}"
    text = text.replace("\n", " ")[:200]
    if files.disk_is_full(error):
        return f"{_DISK_FULL} on device ({text})"
    try:
        free = shutil.disk_usage(root).free
    except OSError:
        return text
    return f"{_DISK_FULL} on device, {free} bytes are free ({text})" if free < _NOTHING_BYTES else text


def _fresh(directory: Path) -> None:
    shutil.rmtree(directory.parent, ignore_errors=True)
    directory.mkdir(parents=True)


def _commit(root: Path, name: str, listed: Manifest, keep: int) -> None:
    temporary, final = root / f"{name}.tmp", root / name
    for file in listed.files:
        files.sync(temporary / file)
    _write(temporary / manifest.NAME, json.dumps(listed.to_json()))
    shutil.rmtree(final, ignore_errors=True)
    os.rename(temporary, final)
    files.sync(root)
    _write(root / LATEST, name)
    others = sorted(d for d in root.iterdir() if _NAME.fullmatch(d.name) and d != final)
    for old in others[: -(keep - 1) or None]:
        shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    """Replace a small file so that a crash leaves either the old or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    files.sync(part)
    os.replace(part, path)
    files.sync(path.parent)
