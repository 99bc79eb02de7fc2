"""A run's log.jsonl as it grows, read on any machine: its last steps, validations and the losses of its tenants.

A log tells the end of its run: its last step, or of tenants its last line, says why there is none after it (``ends``).
Steps of a run that began anew in the same file count from there.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from ...core.errors import EvenloadError, shorten
from ...core.input import reading

_LOOK_S = 0.5
_KEPT = 200
"""Steps that are held."""
_MOST_LINE = 1 << 26
"""Bytes of a line, which may hold the numbers of all samples of a step."""
_MEANS = ("imbalance", "padding_frac", "bubble_frac", "step_s", "predicted_s", "plan_s", "plan_wait_s")
Row = dict[str, Any]


def log_of(run: Path) -> Path:
    """The log of a run: a file, or that of a folder, ``log.jsonl`` or the only one. Raises EvenloadError."""
    do = "train with log.jsonl=RUN/log.jsonl, and name RUN or that file"
    if not os.path.isdir(run):  # unlike Path.is_dir, which raises for names that no file system can have
        if not reading.is_file(run):
            raise EvenloadError(f"there is no run {shorten(str(run))}", "no file and no folder of that name", do)
        return run
    files = [path for path in (run / "log.jsonl",) if path.is_file()] or sorted(run.glob("*.jsonl"))
    if len(files) != 1:
        detail = ", ".join(path.name for path in files) or "no *.jsonl in it"
        raise EvenloadError(f"{shorten(str(run))} has not one log", shorten(detail), do)
    return files[0]


_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Figure = Annotated[float, Field(allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=-1, lt=2)]
"""Rounding may take a share below 0 or above 1."""


class _Tenant(BaseModel, extra="allow", strict=True):
    loss: float | None = None


class _Sparse(BaseModel, extra="allow", strict=True):
    dense: bool


class _Validation(BaseModel, extra="allow", strict=True):
    step: _Count
    loss: float | None = None
    """None: it was no number."""
    generate: dict[str, Any] | None = None
    sparse: _Sparse | None = None


class _Line(BaseModel, extra="allow", strict=True):
    """What is read of a line: of a step, of a validation, or the end of a run."""

    step: _Count | None = None
    step_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    tokens: _Count | None = None
    of_steps: _Count | None = None
    loss: float | None = None
    predicted_s: _Figure | None = None
    plan_s: _Figure | None = None
    plan_wait_s: _Figure | None = None
    imbalance: _Figure | None = None
    padding_frac: _Share | None = None
    bubble_frac: _Share | None = None
    tenants: dict[str, _Tenant] | None = None
    validation: _Validation | None = None
    ends: str | None = None


class Watched:
    """What a log has told so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = deque[Row](maxlen=_KEPT)
        """The last steps."""
        self.steps = self.tokens = 0
        self.validation: Row | None = None
        self.tenants: dict[str, float] = {}
        """The last loss of each."""
        self.ends: str | None = None
        """Why the run ended; None while it goes on."""
        self._first = -1
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def read(self) -> bool:
        """Take what is new in whole lines; whether there was any. Raises EvenloadError."""
        name, do = f"the log {shorten(str(self.path))}", "name the log.jsonl of a run"
        with reading.open_file(self.path, name, do) as file, reading.failures_of(name, do):
            stat = os.fstat(file.fileno())
            if self._identity != (stat.st_dev, stat.st_ino) or stat.st_size < self._offset:
                self._identity, self._offset = (stat.st_dev, stat.st_ino), 0
                self._forget()
            file.seek(self._offset)
            begin = self._offset
            while line := file.readline(_MOST_LINE):
                if not line.endswith(b"\n"):
                    if len(line) == _MOST_LINE:
                        raise EvenloadError(f"{name} has a line without end", f"{_MOST_LINE} bytes and more", do)
                    break  # it is being written
                self._offset += len(line)
                with suppress(ValueError, RecursionError):  # a line of something else, or that a disk has spoilt
                    self._take(_Line.model_validate_json(line))
        return self._offset > begin

    def to_json(self) -> dict[str, Any]:
        """What is known, with means of the steps that are held but for the first of the run, which warms up."""
        rows = [row for row in self.rows if row["step"] != self._first] or list(self.rows)
        seconds = sum(row["step_s"] for row in rows)
        last = self.rows[-1] if self.rows else {}
        return {
            "log": str(self.path),
            "steps": self.steps,
            "of_steps": last.get("of_steps"),
            "ends": self.ends,
            "tokens": self.tokens,
            "loss": last.get("loss"),
            "tokens_per_s": sum(row["tokens"] for row in rows) / seconds if seconds else None,
            "means": {key: _mean([row[key] for row in rows if row.get(key) is not None]) for key in _MEANS},
            "validation": self.validation,
            "tenants": self.tenants,
            "last": [{key: value for key, value in row.items() if key != "samples"} for row in self.rows],
        }

    def _forget(self) -> None:
        self.rows.clear()
        self.steps = self.tokens = 0
        self.validation = self.ends = None
        self.tenants = {}

    def _take(self, line: _Line) -> None:
        if line.validation:
            self.validation = line.validation.model_dump(exclude_unset=True)
        elif line.step is None or line.step_s is None or line.tokens is None:
            self.ends = line.ends or self.ends
        else:
            if self.rows and line.step <= self.rows[-1]["step"]:
                self._forget()
            if not self.rows:
                self._first = line.step
            self.rows.append(line.model_dump(exclude_unset=True))
            self.ends = line.ends
            self.steps += 1
            self.tokens += line.tokens
            self.tenants |= {name: one.loss for name, one in (line.tenants or {}).items() if one.loss is not None}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def watch(run: Path, show: Callable[[dict[str, Any]], object] | None) -> dict[str, Any]:
    """What the log of a run tells: as it is, or with ``show``, which gets that whenever it looks, when the run ends or
    its reader does (Ctrl-C). ``quiet_s``: for how long nothing came. Raises EvenloadError."""
    watched, quiet_s = Watched(log_of(run)), 0.0
    watched.read()
    with suppress(KeyboardInterrupt):
        while show is not None and (watched.ends is None or not quiet_s):
            show({**watched.to_json(), "quiet_s": quiet_s})
            time.sleep(_LOOK_S)
            quiet_s = 0.0 if watched.read() else quiet_s + _LOOK_S
    return {**watched.to_json(), "quiet_s": quiet_s}
