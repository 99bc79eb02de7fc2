"""What the ranks of a job tell each other with every heartbeat, and whom one that reads it blames."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Literal, NamedTuple

from . import failure as failures
from . import marks
from .failure import Failure
from .store_client import StoreClient

ECHO_GONE = 4
"""Heartbeats that a peer may miss once a connection has broken: then somebody is gone, and it is a matter of who."""
_ASK_S = 30.0
"""A rank that has not come for so long is asked after aloud; then again after twice as long, and so on."""


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


class Peers:
    """The other ranks, seen from one; every look at a rank counts as the time between two heartbeats.

    Methods raise StoreLostError. What they return is the failure to post, None while nobody is to blame.
    """

    def __init__(self, store: StoreClient, rank: int, size: int, gone_s: float, stuck_s: float, every_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._gone_s = gone_s
        self._stuck_s = stuck_s
        self._every_s = every_s
        self._seen: dict[int, int] = {}
        self._missed: dict[int, int] = {}
        self._last: dict[int, Beat] = {}
        self._ask_s = _ASK_S

    def neighbour(self) -> Failure | None:
        """Look at the nearest lower rank that still works: whether it came, whether its heart beats."""
        for distance in range(1, self._size):
            rank = (self._rank - distance) % self._size
            beat = self._look(rank)
            missed_s = self._missed[rank] * self._every_s
            if beat is None:
                # Ranks may reach the watched part far apart: one builds a cache, the others wait for it.
                self._ask_after(rank, missed_s)
                return self._gone(rank) if missed_s > self._stuck_s else None
            if beat.state != "done":
                return self._gone(rank) if missed_s > self._gone_s else None
        return None

    def progress(self, idle: int) -> Failure | None:
        """Whether the job hangs, judged by its lowest rank at work; `idle`: this rank's heartbeats without progress."""
        limit = round(self._stuck_s / self._every_s)
        if idle <= limit:
            return None
        beats: dict[int, Beat] = {}
        for rank in range(self._size):
            beat = self._read(rank)
            if beat is None or (beat.state != "done" and rank < self._rank):
                return None  # not everybody has begun, or a lower rank is there to judge
            beats[rank] = beat
        if not hangs(beats, limit):
            return None
        working = {rank: beat for rank, beat in beats.items() if beat.state != "done"}
        others = "the others wait for it" if len(working) > 1 else "the others are done"
        return self._stuck(working, f"no rank made progress for {self._stuck_s:g} s; {others}")

    def look_at_all(self) -> dict[int, Beat | None]:
        """The newest heartbeat of every other rank."""
        return {rank: self._look(rank) for rank in range(self._size) if rank != self._rank}

    def gone(self, *, came: bool) -> Failure | None:
        """The failure of that rank last looked at which missed most heartbeats, if these are `ECHO_GONE` or more.

        ``came``: leave out those that have not beaten yet.
        """
        missed = {rank: count for rank, count in self._missed.items() if rank in self._last or not came}
        rank = max(missed, key=lambda rank: missed[rank], default=-1)
        return self._gone(rank) if missed.get(rank, 0) >= ECHO_GONE else None

    def behind(self, beats: dict[int, Beat | None]) -> Failure | None:
        """Why connections broke although all hearts beat: a rank left early, or lags behind."""
        for rank, beat in beats.items():
            if beat is not None and beat.state == "done":
                return failures.left(rank, self._size, self._rank, beat.host)
        working = {rank: beat for rank, beat in beats.items() if beat is not None and beat.state == "works"}
        return self._stuck(working, "the collectives of other ranks broke or timed out meanwhile") if working else None

    def last_seen(self, rank: int) -> str:
        """Where a rank was: to the very mark under the launcher, else as of its last heartbeat read here; or empty."""
        where = marks.of_rank(rank)
        if where is not None:
            return f"it was in '{where}'"
        last = self._last.get(rank)
        return f"it was last seen in '{last.mark.where}', as of its last heartbeat" if last else ""

    def _read(self, rank: int) -> Beat | None:
        data = self._store.get(f"beat/{rank}")
        if data is None:
            return None
        self._last[rank] = Beat.decode(data)
        return self._last[rank]

    def _look(self, rank: int) -> Beat | None:
        """`_read`, once per own heartbeat: counts how often in a row there was nothing new."""
        beat = self._read(rank)
        tick = beat.tick if beat else 0
        fresh = self._seen.get(rank) != tick or (beat is not None and beat.state == "done")
        self._missed[rank] = 0 if fresh else self._missed[rank] + 1
        self._seen[rank] = tick
        return beat

    def _gone(self, rank: int) -> Failure:
        last = self._last.get(rank)
        if last is None:
            return failures.absent(rank, self._size, self._rank, self._missed[rank] * self._every_s)
        return failures.gone(rank, self._size, self._rank, last.host, self.last_seen(rank))

    def _stuck(self, working: dict[int, Beat], why: str) -> Failure:
        rank = furthest_behind(working)
        return failures.stuck(rank, self._size, working[rank].host, working[rank].mark.where, why)

    def _ask_after(self, rank: int, missed_s: float) -> None:
        if missed_s >= self._ask_s:
            self._ask_s *= 2
            waits = f"rank {self._rank} has waited for it {missed_s:.0f} s and gives up after {self._stuck_s:g} s"
            print(f"evenload: rank {rank} of {self._size} has not come yet; {waits}", file=sys.stderr, flush=True)
