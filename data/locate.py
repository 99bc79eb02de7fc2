"""Which files a spec means, and what to say where it means none."""

from __future__ import annotations

import difflib
import glob
import json
from pathlib import Path

from ..core.errors import EvenloadError
from .stdlib import NAME as BUILT_IN


def table_files(path: Path) -> list[Path]:
    """The arrow or parquet files of a folder, a pattern or a single path; empty where there are none."""
    if path.is_dir():
        if (path / "state.json").is_file():
            return _saved_files(path)
        found = sorted(p for p in path.iterdir() if p.suffix in (".arrow", ".parquet"))
    elif path.is_file():
        found = [path] if path.suffix in (".arrow", ".parquet") else []
    else:
        found = sorted(Path(p) for p in glob.glob(str(path)) if p.endswith((".arrow", ".parquet")))
    suffixes, splits = {p.suffix for p in found}, {p.stem.split("-")[0] for p in found if "-of-" in p.stem}
    if len(suffixes) > 1 or len(splits) > 1:
        raise EvenloadError(
            f"{path} holds more than one data set",
            f"files {', '.join(sorted(suffixes))} of {', '.join(sorted(splits)) or 'no named split'}",
            f"name the files with a pattern, as '{path}/train-*.parquet'",
        )
    return found


def _saved_files(folder: Path) -> list[Path]:
    """The files that `Dataset.save_to_disk` listed in state.json, in its order."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvenloadError(f"{folder}/state.json is damaged", repr(error), "save the data set again") from error
    missing = [path.name for path in files if not path.is_file()]
    fault = f"missing files: {', '.join(missing)}" if missing else ""
    if not files:
        fault = "no data files"
    if state.get("_indices_data_files"):
        fault = "rows chosen by an index beside the data, as releases before 2.0 saved it"
    if fault:
        raise EvenloadError(f"{folder} is not a whole saved data set", fault, "save it again with Dataset.save_to_disk")
    return files


def nothing_there(spec: str, path: Path) -> EvenloadError:
    """The error for a spec that means no data."""
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.is_dir() and _table_like(p))
        inside.sort(key=lambda name: name != "train")
        return EvenloadError(
            f"the folder {spec} holds no .arrow or .parquet file",
            f"data sets below it: {', '.join(inside)}" if inside else "no data set below it either",
            f"open one of them, as {path / inside[0]}" if inside else "give the folder that save_to_disk wrote",
        )
    if path.is_file():
        known = ".jsonl, .bin/.idx, .arrow, .parquet"
        return EvenloadError(f"{spec} is of no known kind", f"the ending {path.suffix!r}", f"known: {known}")
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, [*siblings, BUILT_IN], n=3, cutoff=0.5)
    return EvenloadError(
        f"there is no data {spec!r}",
        f"of a similar name: {', '.join(close)}" if close else f"nothing of a similar name in {path.parent}",
        f"give a path to data, or {BUILT_IN}",
    )


def _table_like(folder: Path) -> bool:
    return any(p.suffix in (".arrow", ".parquet") for p in folder.iterdir())
