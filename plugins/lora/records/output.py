"""What each tenant leaves in ``out/NAME/``: its adapter, the numbers of its steps, and how it stands.

    last/, best/     PEFT folders: the adapter after its last step, and the one of the lowest loss of an evaluation
    metrics.jsonl    one object a step, and one an evaluation
    status.json      `ActiveTenant.status`, never older than a second while it trains

Rank 0 alone writes. Numbers that cannot be written are given up with a warning; an adapter that cannot is its tenant's
failure.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

from ....core.errors import EvenloadError
from ....core.input import reading
from ....core.input.format import to_json
from ....integrations.huggingface.folders.adapters import write_adapter
from ....runtime.adapters.places import AdapterState
from ....runtime.world.agreement import from_first
from ....training.files import write_whole
from ....training.job import logger
from ..arrivals.job import TenantJob
from ..state.status import NAME as STATUS
from ..state.status import read_status
from ..state.tenant import ActiveTenant

METRICS = "metrics.jsonl"
LAST, BEST = "last", "best"
_FINAL = ("done", "stopped", "dropped", "failed")
_STATUS_EVERY_S = 1.0
_MOST_LINE = 1 << 20
"""Characters; no row of ours is as long, and a file may be one line without end."""


class Output:
    """What a job of tenants writes below ``plugins.lora.out``, and says of its tenants."""

    def __init__(self, job: TenantJob) -> None:
        self._job, self._root = job, job.out
        self._said: dict[str, float] = {}
        self._given_up: set[str] = set()

    def folder(self, tenant: ActiveTenant) -> Path:
        return self._root / tenant.name

    def begin(self, tenant: ActiveTenant) -> None:
        """Go on after the rows of the steps that the tenant has trained; of a new one there are none."""
        if self._job.is_rank0:
            with self._giving_up(tenant.name):
                self.folder(tenant).mkdir(parents=True, exist_ok=True)
                _cut(self.folder(tenant) / METRICS, tenant.step)
            self.status(tenant)

    def row(self, tenant: ActiveTenant, row: Mapping[str, Any]) -> None:
        """Add a line to a tenant's numbers; it says ``step``."""
        if self._job.is_rank0:
            with self._giving_up(tenant.name), open(self.folder(tenant) / METRICS, "a", opener=_open) as file:
                file.write(to_json(dict(row)) + "\n")

    def row_again(self, tenant: ActiveTenant, row: Mapping[str, Any]) -> None:
        """Add the line of a tenant's last step, if a rank that is gone has not."""
        path = self.folder(tenant) / METRICS
        if self._job.is_rank0 and not (reading.is_file(path) and _has_step(path, row["step"])):
            self.row(tenant, row)

    def status(self, tenant: ActiveTenant, *, now: bool = True) -> None:
        """Say how a tenant stands; unless ``now``, at most once a second."""
        due = now or time.monotonic() - self._said.get(tenant.name, 0.0) > _STATUS_EVERY_S
        if self._job.is_rank0 and due:
            self._said[tenant.name] = time.monotonic()
            self._write_status(tenant.status())

    def adapter(self, tenant: ActiveTenant, name: str, state: AdapterState | None = None) -> None:
        """Write a tenant's adapter as it is into a folder of that name. Collective. Raises EvenloadError."""
        state = state or self._job.host.adapters.state(tenant.number)
        base = self._job.recipe.model.weights
        folder = self.folder(tenant) / name
        from_first(lambda: write_adapter(folder, tenant.adapter, state.weights, str(base) if base else None), "job")

    def gone(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """How a tenant of a checkpoint's row stands whose file was removed while no job ran."""
        status = {key: row[key] for key in ("name", "step", "steps", "best", "best_step", "tokens", "seconds")}
        status |= {"state": "left", "reason": "its file was removed while no job ran", "left_s": None}
        status |= {"loss": row["losses"][-1] if row["losses"] else None, "file": row["digest"]}
        if self._job.is_rank0:
            self._write_status(status)
        return status

    def _write_status(self, status: Mapping[str, Any]) -> None:
        with self._giving_up(status["name"]):
            write_whole(self._root / status["name"] / STATUS, json.dumps(status, indent=1) + "\n")

    def refused(self, name: str, error: EvenloadError) -> None:
        """A file that cannot be trained is listed with the tenants, unless one of this name was trained."""
        row: Any = {}
        with suppress(EvenloadError):
            row = reading.read_json(self._root / name / STATUS, STATUS, "")
        if self._job.is_rank0 and not (isinstance(row, dict) and row.get("file")):
            reason = f"its file is refused: {error}"
            self._write_status({"name": name, "state": "failed", "reason": reason, "step": 0, "steps": 0, "file": ""})

    @contextmanager
    def _giving_up(self, name: str) -> Iterator[None]:
        """No log is worth a training run: what the disk refuses is said once a tenant."""
        try:
            yield
        except OSError as error:
            if name not in self._given_up:
                self._given_up.add(name)
                logger.warning("numbers of the tenant %s are not written, training goes on: %s", name, error)

    def past(self, name: str, digest: str) -> dict[str, Any] | None:
        """How a tenant of this file has ended in an earlier job; None where it has not, or nobody knows."""
        with suppress(EvenloadError):
            path = self._root / name / STATUS
            known, row = read_status(path), reading.read_json(path, STATUS, "")
            if row.get("file") == digest and known.state in _FINAL and known.name == name:
                return {**row, **asdict(known)}
        return None


def _cut(path: Path, step: int) -> None:
    """Keep the rows of the steps before this one: later ones are of a run that was killed after its checkpoint."""
    if reading.is_file(path):
        with path.open(errors="replace") as file:
            lines = takewhile(lambda line: len(line) < _MOST_LINE, iter(lambda: file.readline(_MOST_LINE), ""))
            kept = [line.rstrip("\n") for line in lines if _is_behind(line, step)]
        write_whole(path, "".join(f"{line}\n" for line in kept))


def _has_step(path: Path, step: int) -> bool:
    lines = path.read_text(errors="replace").splitlines()
    return any(not _is_behind(line, step) for line in lines if "evaluation" not in line)


def _open(path: str, flags: int) -> int:
    """Open for writing; a pipe that nobody reads is an OSError, and not waited for."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _is_behind(line: str, step: int) -> bool:
    """Whether a line is of the first ``step`` steps, or of an evaluation up to there."""
    with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
        row = json.loads(line)
        return 0 < step >= row["step"] if "evaluation" in row else float(row["step"]) < step
    return False
