"""How a tenant stands, as ``out/NAME/status.json``: written by the job, read by `evenload lora` and whoever watches."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from ...core.errors import EvenloadError, shorten
from ...core.input import reading

NAME = "status.json"

State = Literal["waiting", "training", "done", "stopped", "dropped", "failed", "left"]
"""waiting: for memory, or at a rung for the other trials. done: all steps are trained. stopped: patience was at its
end. dropped: in the worse half at a rung. failed: see ``why``. left: its file was removed."""


@dataclass(frozen=True)
class Status:
    """How a tenant stands."""

    tenant: str
    state: State
    step: int = 0
    """Steps that are trained."""
    steps: int = 0
    """Of the whole training."""
    loss: float | None = None
    """Of the last step; null before the first."""
    evaluation: float | None = None
    """Loss of the last evaluation; null before the first."""
    best: float | None = None
    """The lowest loss of all evaluations."""
    best_step: int | None = None
    """Steps before that one."""
    tokens: int = 0
    """That were trained on."""
    time_left_s: float | None = None
    """Predicted from the steps of the job so far; null while nobody knows."""
    why: str = ""
    """What ended it, where that was no end of its own; what it waits for."""


_STATUS = TypeAdapter(Status)


def write_status(folder: Path, status: Status) -> None:
    """Write it into a tenant's folder; a reader sees the one before or this one, never a part."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{NAME}"
    aside.write_text(json.dumps(asdict(status), indent=1) + "\n")
    os.replace(aside, folder / NAME)


def read_status(path: Path) -> Status:
    """The status that a file holds. Raises EvenloadError."""
    name, do = f"the status {shorten(str(path))}", "let the job that trains the tenant write it anew"
    value: Any = reading.read_json(path, name, do)
    try:
        return _STATUS.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        detail = shorten(f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}")
        raise EvenloadError(f"{name} is damaged", detail, do) from error
