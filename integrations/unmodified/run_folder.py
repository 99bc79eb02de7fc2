"""What the processes of `evenload run` leave behind for it: small files in the folder that EVENLOAD_STARTED names.

    1234               process 1234 has imported the trainer, and the recipe is on in it (written by the startup file)
    steps-1234         its rank, the steps that it planned by loop, and what they lack of each plugin
    idle-<digest>      a loop that was recognised and left alone: why, and which line to change
    refused-<digest>   an `EvenloadError`, once for the machine however many ranks raise it
    check, audit ...   what the verb of that name shows of the first step

The folder lies on one machine and lives as long as the command, so files are all that its processes need to share.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import EvenloadError

VARIABLE = "EVENLOAD_STARTED"
"""Names the folder to the processes of the command."""


class Idle(NamedTuple):
    """A loop that evenload knows and in which it plans nothing."""

    loop: str
    why: str
    do: str


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, for those who write into it and for the command that reads it."""

    path: Path

    @classmethod
    def of_process(cls) -> RunFolder | None:
        """The folder of the run which this process belongs to; None outside `evenload run` or on another machine."""
        name = os.environ.get(VARIABLE)
        return cls(Path(name)) if name and os.path.isdir(name) else None

    def write_steps(self, rank: int, loops: dict[str, int], plugins: dict[str, str]) -> None:
        """The planned steps of this process so far, by loop, and what they lack of each plugin, over what it wrote
        before: in one call of some microseconds, since it comes with every step."""
        content = json.dumps({"rank": rank, "loops": loops, "plugins": plugins}).encode()
        file = os.open(self.path / f"steps-{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.write(file, content.ljust(os.fstat(file).st_size))
        finally:
            os.close(file)

    def write_idle(self, idle: Idle) -> bool:
        """Whether this process is the first to say so."""
        return self._write_first("idle", idle)

    def write_refusal(self, error: EvenloadError) -> bool:
        """Whether this process is the first to raise it."""
        return self._write_first("refused", (error.what, error.found, error.do))

    def write_record(self, verb: str, record: dict[str, Any]) -> None:
        """Replaces the verb's file at once, so that a process which is killed leaves no half of it."""
        part = self.path / f".{verb}.{os.getpid()}"
        part.write_text(json.dumps(record), encoding="utf-8")
        part.replace(self.path / verb)

    @property
    def started(self) -> int:
        """Processes that have imported the trainer."""
        return sum(path.name.isdigit() for path in self.path.iterdir())

    @property
    def steps(self) -> dict[str, int]:
        """Planned steps by loop. Every rank of a job plans each, and a command may start several jobs: of the sums over
        processes of one rank it is the largest."""
        by_rank: dict[int, Counter[str]] = {}
        for one in self._read("steps-*"):
            by_rank.setdefault(one["rank"], Counter()).update(one["loops"])
        most: Counter[str] = Counter()
        for loops in by_rank.values():
            most |= loops
        return dict(most)

    @property
    def plugins(self) -> dict[str, str]:
        """The plugins that planned the steps, in their order, and what all processes lack of each."""
        rows = [one["plugins"] for one in self._read("steps-*")]
        return {
            name: min(row[name] for row in rows if name in row) for name in dict.fromkeys(n for r in rows for n in r)
        }

    @property
    def idle(self) -> list[Idle]:
        return [Idle(*parts) for parts in self._read("idle-*")]

    @property
    def refusals(self) -> list[EvenloadError]:
        return [EvenloadError(*parts) for parts in self._read("refused-*")]

    def record(self, verb: str) -> dict[str, Any] | None:
        """What the first step left for a verb; None where no such step was reached on this machine."""
        return next(iter(self._read(verb)), None)

    def _read(self, pattern: str) -> list[Any]:
        """The contents of such files, oldest first."""
        paths = sorted(self.path.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def _write_first(self, kind: str, parts: tuple[str, ...]) -> bool:
        text = json.dumps(parts)
        path = self.path / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True
