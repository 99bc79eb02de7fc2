"""Replicas of a job that come and go, as one of them sees it.

A store that outlives every replica is held by the launcher, which alone says who takes part (`Roster`). A replica that
has opened its trainer arrives there, and takes part from the next roster on:

    latest                  the newest roster
    arrival/0, 1, ...       what replicas that would take part say of themselves; ``arrivals`` counts them
    refused/NUMBER/LIFE     why one may not
    waiting                 for which roster some wait that may; ``admit`` asks for it between two steps
    beat/NUMBER/LIFE        counts the seconds of a replica's life
    step                    steps that the job has finished

A lost replica breaks the calls of the group across, and those who stay meet again in the next roster. There each says
how many steps it has behind it and whether it has all sums of the next one. `commit` makes that enough: where any has
updated its weights, all that are left had come to it, have the sums and update theirs; else nobody does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ...core.errors import EvenloadError, RankError
from ...core.machine.replicas import Roster, RosterMember
from .agreement import from_first, gather_bytes
from .replicas import Changing, JobGroup, ReplicasChangedError, job_group, join, lead
from .variables import LIFE, MEETING_PLACE, REPLICA

if TYPE_CHECKING:
    from .world import World

_PREFIX = "evenload/replicas"
_LOOK_S = 0.1
_BEAT_S = 1.0
_CONNECT_S = 60.0


class Standing(NamedTuple):
    """How far a replica is when it meets the others."""

    step: int
    """Steps that it has finished; below 0: it has no state yet."""
    has_sums: bool = False
    """Of the next step."""
    value: Any = None
    """What it gave to, or got from, the commit of the last step."""


def settler_of(step: int, standings: Sequence[Standing]) -> Standing | None:
    """By whose value a step is settled that a loss has broken, as those who are left stand; None: it is done anew."""
    there = [one for one in standings if one.step >= 0]
    ahead = [one for one in there if one.step > step]
    if ahead or all(one.has_sums for one in there):
        return (ahead or there)[0]
    return None


class Membership:
    """This replica in its job. All methods are collective over the replica's ranks.

    ``shapes``: of the replicas, by their numbers. ``waits``: told every second while this rank waits for others.
    """

    def __init__(self, shapes: Sequence[Mapping[str, Any]], timeout: timedelta, waits: Callable[[], object]) -> None:
        self._place = place = os.environ[MEETING_PLACE]
        self.number = int(os.environ[REPLICA])
        self._shape = dict(shapes[self.number])
        self._timeout = timeout
        self._waits = waits
        self.store = PrefixStore(_PREFIX, _connected(place))
        self.life = from_first(self._life)
        self.roster = Roster(0, ())
        self._latest = self.roster
        self._waiting = 0
        self._done = False
        self._standing = Standing(-1)
        self._group: JobGroup | None = None
        """Of the newest roster, from when its members have met until `begin`."""
        self._standings: list[Standing] = []
        self._watched = PrefixStore(_PREFIX, _connected(place))
        self._watch_thread = threading.Thread(target=self._watch, name="evenload-replicas", daemon=True)
        self._watch_thread.start()

    def _life(self) -> int:
        life = os.environ.get(LIFE)
        return int(life) if life else int(self.store.add(f"lives/{self.number}", 1))

    @property
    def has_state(self) -> bool:
        """Whether this replica has taken part before."""
        return self._standing.step >= 0

    @property
    def changed(self) -> bool:
        """Whether the job goes on with others than those of this replica's roster, as far as this rank has heard."""
        return self._latest.number > self.roster.number

    def next_step(self, step: int) -> None:
        """So many steps are finished; raises ReplicasChangedError where the next one is to be done with others."""
        self._standing = self._standing._replace(step=step, has_sums=False)
        job = job_group()
        if job is None:
            raise ReplicasChangedError("other replicas are there")
        if job.rank == 0:
            self.store.set("step", str(step))
        # The first rank asks for those who wait, and all hear of it together.
        if any(job.everyone(job.rank == 0 and self._waiting > self.roster.number)):
            if job.rank == 0:
                self.store.set("admit", str(self.roster.number))
            raise ReplicasChangedError("a replica has come")

    def arrive(self, about: Mapping[str, Any]) -> None:
        """Say that this replica can take part; ``about``: what has to be the same in all of them."""
        arrival = {
            "member": RosterMember(self.number, self.life, dist.get_world_size(), self._shape),
            "about": dict(about),
        }
        if dist.get_rank() == 0:
            place = self.store.add("arrivals", 1) - 1
            self.store.set(f"arrival/{place}", json.dumps(arrival))

    def meet(self) -> list[Standing]:
        """Meet in the newest roster, waiting for one that is newer than what has begun: how far every rank of the job
        is; nothing where the job is done. Raises EvenloadError where the job refuses this replica, or goes on without
        it."""
        join(None)
        while self._group is None:
            roster = from_first(self._next)
            if roster is None:
                return []
            self.roster = roster
            self._group = self._across()
            if self._group is not None:
                try:
                    self._standings = self._group.everyone(self._standing)
                except ReplicasChangedError:
                    self._group = None
        return self._standings

    def begin(self) -> None:
        """Let calls of the job reach those that have met."""
        join(self._group)
        self._group = None

    def stands_at(self, step: int) -> None:
        """This replica has the state after so many steps."""
        self._standing = Standing(step)

    def leave(self, result: str | None) -> None:
        """The work is done; ``result``: that of the job, on the rank that leads."""
        if result is not None:
            self.store.set("result", result)
        self._done = True
        self._watch_thread.join()
        join(None)

    def _next(self) -> Roster | None:
        """The first roster after this replica's that it takes part in; None: the job is done."""
        own, began_s = (self.number, self.life), time.monotonic()
        while True:
            latest = self._latest
            if latest.number > self.roster.number:
                if latest.place_of(*own) is not None:
                    return latest
                if self.roster.place_of(*own) is not None:
                    raise _left_out(self.number)
            if self.store.check(["result"]):
                return None
            if self.store.check([f"refused/{own[0]}/{own[1]}"]):
                raise EvenloadError(*json.loads(self.store.get(f"refused/{own[0]}/{own[1]}")))
            if time.monotonic() - began_s > _BEAT_S:
                self._waits()
                began_s = time.monotonic()
            time.sleep(_LOOK_S / 4)

    def _across(self) -> JobGroup | None:
        """The group of the roster; None where its members change before they have all come."""
        roster, groups = self.roster, list[JobGroup]()
        place = roster.place_of(self.number, self.life)
        sizes = [one.ranks for one in roster.members]
        rank = sum(sizes[:place]) + dist.get_rank()
        numbers = tuple(one.number for one in roster.members)
        changing = Changing(numbers, lambda: self._latest.number > roster.number, _settled, self._waits, self.commit)

        def make() -> None:
            with suppress(RuntimeError):  # of a store that holds nobody else's address
                store = PrefixStore(f"across/{roster.number}", _connected(self._place))
                groups.append(JobGroup(store, rank, sizes, self._timeout, changing))

        thread = threading.Thread(target=make, name="evenload-meeting", daemon=True)
        thread.start()
        while thread.is_alive() and not changing.changed():
            thread.join(_LOOK_S / 4)
            self._waits()
        return groups[0] if _settled(bool(groups)) else None

    def commit(self, job: JobGroup, value: Any) -> Any:
        """What all ranks take for the value of a step (`replicas.commit`), also where a replica is lost meanwhile."""
        step = self._standing.step
        self._standing = Standing(step, has_sums=True, value=value)
        try:
            value = job.everyone(value)[0]
        except ReplicasChangedError:
            settler = settler_of(step, self.meet())
            if settler is None:
                self._standing = Standing(step)
                raise
            value = settler.value
        self._standing = Standing(step + 1, value=value)
        return value

    def _watch(self) -> None:
        """Hear of rosters, and beat."""
        beat_s, beats, own = 0.0, 0, (self.number, self.life)
        try:
            while not self._done:
                if self._watched.check(["latest"]):
                    self._latest = Roster.decode(self._watched.get("latest"))
                    took_part = self.roster.place_of(*own) is not None and not self._done
                    if took_part and self._latest.place_of(*own) is None:
                        _end(f"evenload: {_left_out(self.number)}")
                if self._watched.check(["waiting"]):
                    self._waiting = int(self._watched.get("waiting"))
                if time.monotonic() - beat_s > _BEAT_S and dist.is_initialized() and dist.get_rank() == 0:
                    beats, beat_s = beats + 1, time.monotonic()
                    self._watched.set(f"beat/{own[0]}/{own[1]}", str(beats))
                time.sleep(_LOOK_S)
        except RuntimeError as error:
            do = "look at the end of the output of the command that holds the meeting place"
            _end(f"evenload: {RankError('the store of the replicas is gone', str(error).splitlines()[0], do)}")


_membership: Membership | None = None


def membership() -> Membership | None:
    """This process's replica in its job; None where replicas do not come and go."""
    return _membership


def own_replica(world: World) -> int:
    """The number in the recipe of the replica that a rank is of."""
    return _membership.number if _membership else world.replica


def own_place(roster: Roster) -> int:
    """The place of this process's replica among those that take part."""
    assert _membership is not None
    place = roster.place_of(_membership.number, _membership.life)
    assert place is not None
    return place


def take_part(shapes: Sequence[Mapping[str, Any]], timeout_s: float, waits: Callable[[], object]) -> Membership:
    """Become known to the job that the environment names; ``shapes``: of its replicas, by their numbers. Collective
    over the replica."""
    global _membership
    lead(False)  # until the others are met
    _membership = Membership(shapes, timedelta(seconds=timeout_s), waits)
    return _membership


def _settled(done: bool) -> bool:
    return all(row == b"\1" for row in gather_bytes(bytes([done])))


def _left_out(number: int) -> RankError:
    what, detail = f"the job goes on without this replica, {number}", "it was stopped, held up or not reached"
    return RankError(what, detail, "see the output of the command that holds the meeting place")


def _end(text: str) -> None:
    if dist.is_initialized() and dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)
    os._exit(1)


def _connected(place: str) -> Store:
    host, _, port = place.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        do = "give --meet HOST:PORT of a command that runs with --elastic"
        raise EvenloadError("the meeting place of the replicas cannot be reached", f"{place}: {error}", do) from error
