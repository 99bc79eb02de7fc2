"""What the ranks of a job tell each other about their progress, and who is behind: plain data and pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple


class Mark(NamedTuple):
    """How far a rank has come."""

    step: int = 0
    waits: bool = False
    """It said that from here it only waits for others."""
    seq: int = 0
    """Marks within `step`."""
    where: str = "the start"

    def next(self, where: str, step: int, waits: bool) -> Mark:
        return Mark(step, waits, self.seq + 1 if step == self.step else 0, where[:200])


class Beat(NamedTuple):
    """One heartbeat of one rank."""

    host: str
    tick: int
    """Counts the heartbeats: one that stands still means that the process is gone."""
    idle: int
    """Heartbeats since the last mark."""
    state: Literal["works", "echo", "done"]
    """`echo`: it met an error that only says that a peer went away. `done`: it left the watched part."""
    mark: Mark

    def encode(self) -> str:
        return json.dumps(self)

    @classmethod
    def decode(cls, data: bytes) -> Beat:
        host, tick, idle, state, mark = json.loads(data)
        return cls(host, tick, idle, state, Mark(*mark))


def furthest_behind(beats: Mapping[int, Beat]) -> int:
    """The rank that the others wait for.

    It is in the earliest step, works rather than waits, and has set the fewest marks there (last, because ranks may run
    unequal numbers of micro-batches); the lowest such rank where several are alike.
    """
    return min(beats, key=lambda rank: (beats[rank].mark[:3], rank))


def hangs(beats: Mapping[int, Beat], idle: int) -> bool:
    """Whether no rank that is not done has made progress for more than `idle` heartbeats."""
    return all(b.idle > idle for b in beats.values() if b.state != "done")
