"""How the trials of a sweep rank, as ``out/NAME/ranking.json``; its winner's adapter is copied to ``out/NAME/best``."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ....core.errors import EvenloadError, shorten
from ....core.input import reading
from ....training.files import write_whole
from ..state.status import State, TenantStatus, validated
from .halving import Halving
from .trials import Sweep

NAME, BEST = "ranking.json", "best"
EVALUATED = "the lowest loss of held-out samples"
TRAINED = "the mean loss of training since the rung before, as nothing is evaluated"


@dataclass(frozen=True)
class _Row:
    trial: str
    state: State
    step: int
    steps: int
    loss: float | None


@dataclass(frozen=True)
class _Race:
    rung: int
    losses: Mapping[str, Mapping[int, float]]
    ended: Mapping[str, float]
    out: Mapping[str, int]


@dataclass(frozen=True)
class _Ranking:
    sweep: str
    winner: str | None
    best: str | None
    loss_is: str
    trials: Sequence[_Row]
    race: _Race | None = None


_RANKING = TypeAdapter(_Ranking)
"""What must be in a file for it to be shown, and for its race to go on."""


def ranking_of(
    sweep: Sweep, halving: Halving, losses: Mapping[str, float], standing: Mapping[str, TenantStatus]
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
    write_whole(folder / NAME, json.dumps(ranking, indent=1) + "\n")
    return ranking


def race_in(out: Path, name: str, digest: str) -> dict[str, Any] | None:
    """How far the race of a sweep of this file had come in an earlier job; None where nobody knows."""
    with suppress(EvenloadError):
        ranking = _read(out / name / NAME)
        race: dict[str, Any] | None = ranking.get("race") if ranking.get("file") == digest else None
        return race
    return None


def rankings(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The rankings in these folders of tenants, where there are any. Raises EvenloadError for a damaged one."""
    return [_read(folder / NAME) for folder in folders if reading.is_file(folder / NAME)]


def _read(path: Path) -> dict[str, Any]:
    name, do = f"the ranking {shorten(str(path))}", "let the job that trains the sweep write it anew"
    value = reading.mapping(reading.read_json(path, name, do), name, do)
    validated(value, _RANKING, name, do)
    return value
