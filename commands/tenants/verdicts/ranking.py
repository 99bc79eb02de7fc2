"""How the trials of a sweep rank, as ``out/NAME/ranking.json``; its winner's adapter is copied to ``out/NAME/best``."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....core.errors import EvenloadError, shorten
from ....core.input import reading
from ..status import Status
from .halving import Halving
from .trials import Sweep

NAME, BEST = "ranking.json", "best"
EVALUATED = "the lowest loss of held-out samples"
TRAINED = "the mean loss of training since the rung before, as nothing is evaluated"
_ROW = {"trial", "state", "step", "steps", "loss"}
_KEYS = {"sweep", "winner", "best", "loss_is", "trials"}


def ranking_of(
    sweep: Sweep, halving: Halving, losses: Mapping[str, float], standing: Mapping[str, Status]
) -> dict[str, Any]:
    """The ranking of a sweep whose trials have these losses and states; ready for JSON.

    ``winner`` and ``best`` are null while trials train, and where all of them have failed.
    """
    values = {trial.name: trial.values for trial in sweep.trials}
    scored = sweep.trials[0].tenant.evaluate is not None
    names = halving.ranking(losses)
    winner = next((name for name in names if standing[name].state in ("done", "stopped")), None)
    rows = [
        {
            "trial": name,
            "values": dict(values[name]),
            "state": standing[name].state,
            "step": standing[name].step,
            "steps": standing[name].steps,
            "loss": losses.get(name),
        }
        for name in names
    ]
    return {
        "sweep": sweep.name,
        "winner": winner if halving.over else None,
        "best": None,
        "loss_is": EVALUATED if scored else TRAINED,
        "trials": rows,
    }


def write_ranking(out: Path, ranking: dict[str, Any], adapter: Path | None) -> dict[str, Any]:
    """Write a ranking below the folder ``out``, with ``adapter``, the winner's folder; the ranking as it was written.

    Folders and file appear whole or not at all.
    """
    folder = out / ranking["sweep"]
    folder.mkdir(parents=True, exist_ok=True)
    if adapter is not None:
        aside = folder / f".{BEST}"
        for old in (aside, folder / BEST):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(adapter, aside)
        os.replace(aside, folder / BEST)
        ranking = {**ranking, "best": str(folder / BEST)}
    aside = folder / f".{NAME}"
    aside.write_text(json.dumps(ranking, indent=1) + "\n")
    os.replace(aside, folder / NAME)
    return ranking


def race_in(out: Path, name: str, digest: str) -> dict[str, Any] | None:
    """How far the race of a sweep of this file had come in an earlier job; None where nobody knows."""
    path = out / name / NAME
    ranking = _read(path) if reading.is_file(path) else {}
    race: dict[str, Any] | None = ranking.get("race") if ranking.get("file") == digest else None
    return race


def rankings(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The rankings in these folders of tenants, where there are any. Raises EvenloadError for a damaged one."""
    return [_read(folder / NAME) for folder in folders if reading.is_file(folder / NAME)]


def _read(path: Path) -> dict[str, Any]:
    name, do = f"the ranking {shorten(str(path))}", "let the job that trains the sweep write it anew"
    value = reading.mapping(reading.read_json(path, name, do), name, do)
    rows = value.get("trials")
    whole = isinstance(rows, list) and all(isinstance(row, dict) and row.keys() >= _ROW for row in rows)
    if not whole or not value.keys() >= _KEYS:
        raise EvenloadError(f"{name} is damaged", f"keys {sorted(value)}", do)
    return value
