"""Replicas on this machine that come and go: each is started as a job of its own, and started again when it is lost.

The command with ``--elastic`` holds the meeting place and says who takes part (`runtime.world.roster`): those that have
arrived, without those whose processes have ended or stand still, or who are on other machines and do not beat any more.
One with ``--replica N --meet HOST:PORT`` and without ``--elastic`` starts that replica, and meets the others there.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

from ...core.errors import EvenloadError, RankError, refuse_first, shorten
from ...core.input.bounds import LOCAL_RANKS
from ...core.machine.replicas import Roster, RosterMember, named_rank
from ...core.recipe.recipe import Recipe
from ...runtime.watchdog import marks
from ...runtime.watchdog.store_socket import STORE_SOCKET, bound
from ...runtime.world.variables import LIFE, MEETING_PLACE, REPLICA, RESULT
from ..progress import PROGRESS_SOCKET, Progress, pass_on_progress, progress_sockets
from .processes import LOOK_S, REAP_S, RanksFailed, is_stopped, start_rank, terminable
from .replica_choice import Elastic
from .verdict import Rank, killed

logger = logging.getLogger("evenload")
MOST_LOSSES = 3
"""A replica that is lost so often with no step finished in between is given up."""
_SAY_S = 1.5
"""Ranks of a lost replica have this long to say what they met."""
_CONNECT_S = 60.0
PREFIX = "evenload/replicas"


class LocalReplica:
    """The processes of one replica, and its life."""

    def __init__(self, number: int, life: int, words: Sequence[str], sizes: Sequence[int], shared: dict[str, str]):
        self.number, self.life = number, life
        self.names = [named_rank(sizes, sum(sizes[:number]) + rank) for rank in range(sizes[number])]
        self.lost_s: float | None = None
        self._stopped_s = 0.0
        self._opened = ExitStack()
        self._places = Path(self._opened.enter_context(tempfile.TemporaryDirectory(prefix="evenload-")))
        self.progress, other_end = progress_sockets()
        own = {**shared, REPLICA: str(number), LIFE: str(life), marks.MARKS: str(self._places)}
        self.ranks: list[Popen[bytes]] = []
        with bound() as store, other_end:
            of_first = {STORE_SOCKET: store, PROGRESS_SOCKET: other_end}
            for rank in range(sizes[number]):
                place = {"LOCAL_RANK": str(sum(sizes[:number]) + rank)}
                self.ranks.append(start_rank(words, rank, sizes[number], {**own, **place}, of_first, sum(sizes)))

    def look(self, gone_s: float) -> list[Rank]:
        """Its ranks as they are."""
        seen = [Rank(one.poll(), is_stopped(one), "", name) for one, name in zip(self.ranks, self.names, strict=True)]
        self._stopped_s = self._stopped_s + LOOK_S if any(rank.stopped for rank in seen) else 0.0
        if self._stopped_s > gone_s or any(rank.code for rank in seen):
            return [one._replace(where=marks.read(self._places, rank)) for rank, one in enumerate(seen)]
        return seen

    def stands_still(self, gone_s: float) -> bool:
        """Whether a rank has been stopped for so long."""
        return self._stopped_s > gone_s

    def end(self) -> None:
        """Leave no process of it, and no file."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            with suppress(TimeoutExpired):
                rank.wait(REAP_S)
        self.progress.close()
        self._opened.close()


class Roll:
    """Who takes part: a pure account of arrivals and losses, which tells when there is a new roster."""

    def __init__(self) -> None:
        self.roster = Roster(0, ())
        self.ready: dict[int, RosterMember] = {}
        self._about: dict[str, Any] | None = None
        self._lives: dict[int, int] = {}

    def arrives(self, member: RosterMember, about: dict[str, Any]) -> EvenloadError | None:
        """A replica that would take part; why it may not."""
        present = next((one for one in self.roster.members if one.number == member.number), None)
        known = self._about or about
        unlike = sorted(key for key in {*known, *about} if known.get(key) != about.get(key))
        try:
            refuse_first(
                (
                    present is not None,
                    f"replica {member.number} takes part in the job already",
                    f"life {present.life if present else 0}",
                    "join under another --replica N",
                ),
                (
                    bool(unlike),
                    "this replica would train something else than the job",
                    ", ".join(f"{key} {shorten(f'{about.get(key)}, not {known.get(key)}')}" for key in unlike),
                    "give it the recipe, weights, data and evenload version of the others",
                ),
            )
        except EvenloadError as error:
            return error
        self._about = known
        self.ready[member.number] = member
        return None

    def lose(self, number: int, life: int) -> bool:
        """A replica is lost; whether it took part."""
        if (waiting := self.ready.get(number)) and waiting.life == life:
            del self.ready[number]
        return self.roster.place_of(number, life) is not None

    def next(self, lost: Iterable[tuple[int, int]] = ()) -> Roster:
        """The roster without those that are lost, and with all that are ready."""
        gone = set(lost)
        members = [one for one in self.roster.members if one[:2] not in gone] + list(self.ready.values())
        self.ready = {}
        self.roster = Roster(self.roster.number + 1, tuple(sorted(members)))
        return self.roster


def launch_replicas(words: Sequence[str], recipe: Recipe, elastic: Elastic, progress: Progress) -> dict[str, Any]:
    """Train on replicas that come and go, and return the result; see the module.

    Raises RanksFailed and RankError as `launch.launch`, when no replica is left.
    """
    sizes, numbers = recipe.ranks_of_replicas, elastic.numbers(recipe)
    if (size := sum(sizes[number] for number in numbers)) > LOCAL_RANKS:
        do = "start each replica on a machine of its own with --replica N --meet HOST:PORT"
        raise EvenloadError(f"one machine runs at most {LOCAL_RANKS} ranks", f"{size} ranks", do)
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    return _Job(words, recipe, elastic, progress).run(numbers)


class _Job:
    def __init__(self, words: Sequence[str], recipe: Recipe, elastic: Elastic, progress: Progress) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        self._words = words
        self._sizes = recipe.ranks_of_replicas
        self._safety = recipe.safety
        self._progress = progress
        self._holds = elastic.holds
        host, _, port = (elastic.meet or "127.0.0.1:0").rpartition(":")
        try:
            server = TCPStore(
                host,
                int(port),
                is_master=elastic.holds,
                timeout=timedelta(seconds=_CONNECT_S),
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError) as error:
            what = "the meeting place cannot be opened" if elastic.holds else "nobody is at the meeting place"
            detail = f"--meet {elastic.meet}: {str(error).splitlines()[0]}"
            raise EvenloadError(what, detail, "give HOST:PORT of the command that runs with --elastic") from error
        self._place = f"{host}:{server.port}"
        self._store = PrefixStore(PREFIX, server)
        self._roll = Roll()
        self._replicas: dict[int, LocalReplica] = {}
        self._losses: dict[int, tuple[str, int]] = {}
        self._beats: dict[tuple[int, int], tuple[str, float]] = {}
        self._arrivals = 0
        self._processes: list[Popen[bytes]] = []
        self._last: RankError | int | None = None

    def run(self, numbers: Sequence[int]) -> dict[str, Any]:
        if self._holds:
            _say(f"replicas meet at {self._place}: others join with --replica N --meet {self._place}")
        with terminable(self._processes) as passed_on:
            try:
                for number in numbers:
                    self._start(number)
                while self._replicas:
                    time.sleep(LOOK_S)
                    self._look()
            finally:
                for one in self._replicas.values():
                    one.end()
            if not self._store.check(["result"]):
                if passed_on:
                    raise RanksFailed(128 + passed_on[0])
                if isinstance(self._last, int):
                    raise RanksFailed(self._last)
                raise self._last or RankError("the replicas ended without a result")
            return json.loads(self._store.get("result"))  # type: ignore[no-any-return]

    def _start(self, number: int) -> None:
        life = int(self._store.add(f"lives/{number}", 1))
        shared = {MEETING_PLACE: self._place, RESULT: ""}
        self._replicas[number] = LocalReplica(number, life, self._words, self._sizes, shared)
        self._processes[:] = [rank for replica in self._replicas.values() for rank in replica.ranks]

    def _look(self) -> None:
        """Once: who has ended, who has come."""
        finished = self._store.check(["result"])
        lost: list[tuple[int, int]] = []
        for number, one in list(self._replicas.items()):
            seen = one.look(self._safety.gone_s)
            too_late = finished and self._roll.roster.place_of(number, one.life) is None
            if too_late or all(rank.code == 0 or (finished and rank.code is not None) for rank in seen):
                self._drop(number)
            elif one.lost_s is not None:
                if time.monotonic() - one.lost_s > _SAY_S or all(rank.code is not None for rank in seen):
                    self._drop(number)
                    self._again(number)
            elif any(rank.code for rank in seen) or one.stands_still(self._safety.gone_s):
                one.lost_s = time.monotonic()
                self._tell(one, seen)
                if one.stands_still(self._safety.gone_s):
                    one.end()
                lost.append((number, one.life))
        leads = min((one.number for one in self._roll.roster.members), default=min(self._replicas, default=0))
        for number, one in self._replicas.items():
            pass_on_progress(one.progress, self._progress if number == leads else _nobody)
        if self._holds and not finished:
            self._publish([*lost, *self._silent()])
        elif not self._holds:
            for number, life in lost:
                self._store.set(f"gone/{number}/{life}", "1")

    def _drop(self, number: int) -> None:
        self._replicas.pop(number).end()
        self._processes[:] = [rank for replica in self._replicas.values() for rank in replica.ranks]

    def _tell(self, one: LocalReplica, seen: Sequence[Rank]) -> None:
        step = self._step()
        codes = [rank.code for rank in seen if rank.code]
        if any(code < 0 for code in codes):
            self._last = killed(seen, sum(self._sizes))
            why = self._last.what
        elif codes:
            self._last = max(codes)
            why = f"its ranks have ended with exit codes {codes}"
        else:
            self._last = RankError(f"a rank of replica {one.number} was stopped", "no progress", "see who sent SIGSTOP")
            why = "a rank of it is stopped"
        _say(f"replica {one.number} is lost after step {step}: {why}")
        before, times = self._losses.get(one.number, ("", 0))
        self._losses[one.number] = step, times + 1 if before == step else 1

    def _again(self, number: int) -> None:
        """Start a lost replica again, unless that has been in vain."""
        if self._losses[number][1] >= MOST_LOSSES or self._last == 2:
            why = (
                "its request is refused" if self._last == 2 else f"it was lost {MOST_LOSSES} times with no step between"
            )
            _say(f"replica {number} is given up: {why}")
            return
        self._start(number)

    def _step(self) -> str:
        return self._store.get("step").decode() if self._store.check(["step"]) else "0"

    def _silent(self) -> list[tuple[int, int]]:
        """Members on other machines that are lost: they do not beat any more, or their launcher says so."""
        lost, now_s = [], time.monotonic()
        for number, life, *_ in self._roll.roster.members:
            here = self._replicas.get(number)
            if here is not None and here.life == life:
                continue
            if number in self._losses and here is None:
                continue
            if self._store.check([f"gone/{number}/{life}"]):
                lost.append((number, life))
                continue
            key = f"beat/{number}/{life}"
            beat = self._store.get(key).decode() if self._store.check([key]) else ""
            before, since_s = self._beats.get((number, life), ("", now_s))
            self._beats[number, life] = (beat, now_s) if beat != before else (before, since_s)
            if now_s - self._beats[number, life][1] > self._safety.gone_s:
                _say(f"replica {number} is lost after step {self._step()}: no heartbeat")
                lost.append((number, life))
        return lost

    def _publish(self, lost: Sequence[tuple[int, int]]) -> None:
        roll = self._roll
        count = int(self._store.add("arrivals", 0))
        for place in range(self._arrivals, count):
            arrival = json.loads(self._store.get(f"arrival/{place}"))
            member = RosterMember(*arrival["member"])
            if error := roll.arrives(member, arrival["about"]):
                _say(f"a replica that would join is refused: {error}")
                key, parts = f"refused/{member.number}/{member.life}", [error.what, error.found, error.do]
                self._store.set(key, json.dumps(parts))
        self._arrivals = count
        took_part = [one for one in lost if roll.lose(*one)]
        left = [one for one in roll.roster.members if one[:2] not in took_part]
        if not left:
            here = [one for one in self._replicas.values() if one.lost_s is None]
            due = bool(here) and all(one.number in roll.ready for one in here)
        else:
            asked = self._store.get("admit").decode() if self._store.check(["admit"]) else "0"
            due = bool(took_part) or bool(roll.ready and asked == str(roll.roster.number))
        if took_part and not due:
            roll.roster = roll.roster._replace(members=())
        if due:
            before = {one[:2] for one in roll.roster.members}
            roster = roll.next(took_part)
            self._store.set("latest", roster.encode())
            came = [str(one.number) for one in roster.members if one[:2] not in before]
            if roster.number > 1:
                who = ", ".join(str(one.number) for one in roster.members)
                _say(f"replicas {who} go on after step {self._step()}" + (f"; {', '.join(came)} came" if came else ""))
        elif roll.ready:
            self._store.set("waiting", str(roll.roster.number + 1))


def _nobody(*_: object) -> None:
    """Progress of a replica that does not speak for the job."""


def _say(text: str) -> None:
    logger.warning("%s", text)
