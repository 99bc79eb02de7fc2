"""Which files a spec means, and what to say where it means none."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..core.errors import SHOWN, EvenloadError, shorten, shown
from ..core.input import reading
from .rows import docstrings
from .stdlib import NAME as STDLIB

_TABLES = (".arrow", ".parquet")
_PAIR = (".bin", ".idx")
_BUILT_IN = (STDLIB, docstrings.NAME, docstrings.HELD_OUT)


def table_files(path: Path) -> list[Path]:
    """The arrow or parquet files of a folder, a pattern or a single path; empty where there are none."""
    if os.path.isdir(path):
        if reading.is_file(path / "state.json"):
            return _saved_files(path)
        files = [p for p in _inside(path) if p.suffix in _TABLES]
    elif reading.is_file(path):
        files = [path] if path.suffix in _TABLES else []
    else:
        names = [] if "\0" in str(path) else glob.glob(str(path))
        files = sorted(Path(name) for name in names if name.endswith(_TABLES))
    for file in files:
        reading.open_file(file, shorten(str(file)), "save the data set again").close()
    suffixes, splits = {p.suffix for p in files}, {p.stem.split("-")[0] for p in files if "-of-" in p.stem}
    if len(suffixes) > 1 or len(splits) > 1:
        detail = f"files {', '.join(sorted(suffixes))} of {', '.join(sorted(splits)) or 'no named split'}"
        do = f"name the files with a pattern, as '{path}/train-*.parquet'"
        raise EvenloadError(f"{path} holds more than one data set", detail, do)
    return files


def _saved_files(folder: Path) -> list[Path]:
    """The files that `Dataset.save_to_disk` listed in state.json, in its order."""
    name, do = f"{shorten(str(folder))}/state.json", "save the data set again"
    state = reading.mapping(reading.read_json(folder / "state.json", name, do), name, do)
    try:
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise EvenloadError(f"{name} is damaged", shown(error), do) from error
    missing = [path.name for path in files if not reading.is_file(path)]
    fault = f"missing files: {shorten(', '.join(missing))}" if missing else ""
    if not files:
        fault = "no data files"
    if state.get("_indices_data_files"):
        fault = "rows chosen by an index beside the data, as releases before 2.0 saved it"
    if fault:
        raise EvenloadError(f"{folder} is not a whole saved data set", fault, "save it again with Dataset.save_to_disk")
    return files


def nothing_there(spec: str, path: Path) -> EvenloadError:
    """The error for a spec that means no data."""
    if os.path.isdir(path):
        tables = (p for p in _inside(path) if p.is_dir() and any(f.suffix in _TABLES for f in _inside(p)))
        inside = sorted((p.name for p in tables), key=lambda name: name != "train")
        return EvenloadError(
            f"the folder {spec} holds no .arrow or .parquet file",
            f"data sets below it: {', '.join(inside)}" if inside else "no data set below it either",
            f"open one of them, as {path / inside[0]}" if inside else "give the folder that save_to_disk wrote",
        )
    if reading.is_file(path):
        known = ".jsonl, .bin/.idx, .arrow, .parquet"
        return EvenloadError(f"{spec} is of no known kind", f"the ending {shown(path.suffix)}", f"known: {known}")
    siblings = [p.name for p in _inside(path.parent)] if os.path.isdir(path.parent) else []
    close = difflib.get_close_matches(path.name[:SHOWN], [*siblings, *_BUILT_IN], n=3, cutoff=0.5)
    nothing = f"nothing of a similar name in {shorten(str(path.parent))}"
    detail = f"of a similar name: {', '.join(close)}" if close else nothing
    return EvenloadError(f"there is no data {shown(spec)}", detail, f"give a path to data, or {' or '.join(_BUILT_IN)}")


def refuse_outside(root: Path, specs: Mapping[str, str]) -> None:
    """Raise EvenloadError where a spec, by the key that says it, leads out of a folder: by itself, by a link, or by a
    file that it opens. What is built in leads nowhere."""
    within = os.path.realpath(root)
    for key, spec in specs.items():
        for path in () if spec == "bytes" or spec.partition("/")[0] in _BUILT_IN else _opened(Path(spec).expanduser()):
            if os.path.commonpath([within, real := os.path.realpath(path)]) != within:
                detail, do = f"{shorten(str(path))}, which is {shorten(real)}", f"put it below {shorten(within)}"
                raise EvenloadError(f"{key} leads out of plugins.lora.root", detail, do)


def _opened(path: Path) -> Iterator[Path]:
    """What opening a spec may read, itself first."""
    yield path
    yield from (Path(f"{path.with_suffix('') if path.suffix in _PAIR else path}{suffix}") for suffix in _PAIR)
    yield from path.glob("*")
    yield from path.glob("*/*")
    yield from table_files(path)


def _inside(folder: Path) -> list[Path]:
    """What a folder holds, by name; nothing where it may not be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
