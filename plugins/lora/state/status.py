"""How a tenant stands, read again from ``out/NAME/status.json``, which its job writes (`ActiveTenant.status`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from ....core.errors import EvenloadError, shorten
from ....core.input import reading
from ....training.files import write_whole

NAME = "status.json"
_OUT = ".out"
Kind = TypeVar("Kind")

State = Literal["waiting", "training", "done", "stopped", "dropped", "left", "failed"]
"""waiting: for memory, or for other trials of its sweep; stopped: early, by its evaluations; dropped: by its sweep, in
the worse half; left: its file is gone."""
ENDED: tuple[State, ...] = ("done", "stopped", "dropped", "left", "failed")


@dataclass(frozen=True)
class TenantStatus:
    """How far a tenant has come, as its status file says."""

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


_STATUS = TypeAdapter(TenantStatus)


def leave_word(folder: Path, out: Path) -> None:
    """Let the folder of tenants say where their job writes, for whoever looks there; it may be read-only."""
    with suppress(OSError):
        write_whole(folder / _OUT, str(out.resolve()))


def out_of(folder: Path) -> list[Path]:
    """Where a job may have written that has this folder of tenants, or this folder for what they leave."""
    beside = [folder, folder / "out", folder.parent / "out"]
    with suppress(EvenloadError, UnicodeDecodeError):
        beside.insert(1, Path(reading.read_bytes(folder / _OUT, 1 << 12, _OUT, "").decode()))
    return beside


def status_of(row: Mapping[str, Any]) -> TenantStatus:
    """What a job says of a tenant (`ActiveTenant.status`)."""
    return TenantStatus(**{field.name: row[field.name] for field in fields(TenantStatus) if field.name in row})


def read_status(path: Path) -> TenantStatus:
    """The status that a file holds. Raises EvenloadError."""
    name, do = f"the status {shorten(str(path))}", "let the job that trains the tenant write it anew"
    return validated(reading.read_json(path, name, do), _STATUS, name, do)


def validated(value: Any, kind: TypeAdapter[Kind], name: str, do: str) -> Kind:
    """A value of JSON as what a file must hold. Raises EvenloadError."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        detail = shorten(f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}")
        raise EvenloadError(f"{name} is damaged", detail, do) from error
