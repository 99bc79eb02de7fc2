"""A run's log.jsonl as it grows, read on any machine: its last steps, validations and the losses of its tenants.

A log tells the end of its run: its last step, or of tenants its last line, says why there is none after it (``ends``).
Steps of a run that began anew in the same file count from there.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...core.errors import EvenloadError, shorten
from ...core.input import reading

_KEPT = 200
"""Steps that are held."""
_MEANS = ("imbalance", "padding_frac", "bubble_frac", "step_s", "predicted_s", "plan_s", "plan_wait_s")
Row = dict[str, Any]


def log_of(run: Path) -> Path:
    """The log of a run: a file, or that of a folder, ``log.jsonl`` or the only one. Raises EvenloadError."""
    do = "train with log.jsonl=RUN/log.jsonl, and name RUN or that file"
    if not run.is_dir():
        if not reading.is_file(run):
            raise EvenloadError(f"there is no run {shorten(str(run))}", "no file and no folder of that name", do)
        return run
    files = [path for path in (run / "log.jsonl",) if path.is_file()] or sorted(run.glob("*.jsonl"))
    if len(files) != 1:
        detail = ", ".join(path.name for path in files) or "no *.jsonl in it"
        raise EvenloadError(f"{shorten(str(run))} has not one log", shorten(detail), do)
    return files[0]


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
        try:
            with open(self.path, "rb") as file:
                stat = self.path.stat()
                if self._identity != (stat.st_dev, stat.st_ino) or stat.st_size < self._offset:
                    self._identity, self._offset = (stat.st_dev, stat.st_ino), 0
                    self._forget()
                file.seek(self._offset)
                text = file.read()
        except OSError as error:
            raise EvenloadError(f"the log {shorten(str(self.path))} cannot be read", str(error.strerror)) from error
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError, TypeError, KeyError, AttributeError):  # a line that a disk has spoilt
                self._take(json.loads(line))
        return bool(whole)

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

    def _take(self, row: Mapping[str, Any]) -> None:
        if "validation" in row:
            self.validation = dict(row["validation"])
        elif "ends" in row and "step_s" not in row:
            self.ends = row["ends"]
        elif "step_s" in row:
            if self.rows and row["step"] <= self.rows[-1]["step"]:
                self._forget()
            if not self.rows:
                self._first = row["step"]
            self.rows.append(dict(row))
            self.ends = row.get("ends")
            self.steps += 1
            self.tokens += row["tokens"]
            losses = {name: numbers.get("loss") for name, numbers in (row.get("tenants") or {}).items()}
            self.tenants |= {name: loss for name, loss in losses.items() if loss is not None}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
