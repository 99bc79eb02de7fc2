"""How a tenant stands, read again from ``out/NAME/status.json``, which its job writes (`ActiveTenant.status`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from ...core.errors import EvenloadError, shorten
from ...core.input import reading

NAME = "status.json"

State = Literal["waiting", "training", "done", "stopped", "dropped", "left", "failed"]
"""waiting: for memory, or for other trials of its sweep; stopped: early, by its evaluations; dropped: by its sweep, in
the worse half; left: its file is gone."""
ENDED: tuple[State, ...] = ("done", "stopped", "dropped", "left", "failed")


@dataclass(frozen=True)
class Status:
    """How a tenant stands."""

    name: str
    state: State
    step: int
    """Steps that are trained."""
    steps: int
    """Of the whole training."""
    loss: float | None = None
    """Of the last step; None before the first."""
    best: float | None = None
    """The lowest loss of all evaluations."""
    best_step: int = 0
    """Steps before that one."""
    tokens: int = 0
    """That were trained on."""
    left_s: float | None = None
    """Until it is done, by its steps so far; None where nobody knows."""
    reason: str = ""
    """Why it waits or has ended, where the state does not say."""


_STATUS = TypeAdapter(Status)


def status_of(row: Mapping[str, Any]) -> Status:
    """What a job says of a tenant (`ActiveTenant.status`)."""
    return Status(**{field.name: row[field.name] for field in fields(Status) if field.name in row})


def read_status(path: Path) -> Status:
    """The status that a file holds. Raises EvenloadError."""
    name, do = f"the status {shorten(str(path))}", "let the job that trains the tenant write it anew"
    value = reading.read_json(path, name, do)
    try:
        return _STATUS.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        detail = shorten(f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}")
        raise EvenloadError(f"{name} is damaged", detail, do) from error
