"""End the whole job, with one message that names the right rank, as soon as one rank fails, dies or hangs.

Left alone, a dead rank shows up in its peers as "Connection closed by peer", a hung one as nothing for half an hour.
So every rank runs a thread beside its work that beats on the job's store; the work itself gains no collective.

* A rank that raises posts its failure; the first post wins (`compare_set`), all others end quietly behind it.
* A rank without a heartbeat for `gone_s` is gone: killed, or inside a call that holds the interpreter lock. Each rank
  watches the nearest lower rank that still works, so the cost per rank does not grow with the job.
* If no rank has made progress for `stuck_s` the job hangs. `at` marks progress; the culprit is the rank furthest
  behind; of ranks that stand at one place, as they do in a ring, one that is not inside a collective and waits for no
  message. A rank that computes for long is not stuck as long as any other gets ahead within `stuck_s`.
* An error that only says that a peer went away is not blamed: the rank holds still and looks at all the others.

Time is counted in heartbeats, not by the clock: a machine that slept, or a watcher that was held up itself, blames
nobody. One process prints: the culprit if it can, with its traceback or the place where it hangs, otherwise the rank
that noticed. Under torchrun the culprit's error also becomes the root cause in torchrun's own report.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
import traceback
from multiprocessing import active_children
from types import TracebackType
from typing import Literal, NoReturn

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from .failure import Failure, is_echo, raised
from .heartbeat import Beat, Mark, furthest_behind, hangs
from .plane import Pending

_ECHO_GONE = 4
"""Heartbeats that a peer may miss once a connection has broken: then somebody is gone, and it is a matter of who."""
_ECHO_LOOKS = 8
"""Looks at all peers after which a broken connection is explained by their progress, since all of them beat."""
_COURTESY_S = 1.0
"""torchrun takes the first rank that exits for the culprit, so the others hold back for this long."""
_FAREWELL_S = 10.0
"""How long the rank that holds the store waits for the others to read from it before it ends."""

_WAITING = {_get_default_store.__code__.co_filename, Pending.wait.__code__.co_filename}
"""Files whose functions wait for other ranks."""

_watchdogs = itertools.count()


class Watchdog:
    """Context manager around the work of one rank; without a process group, or alone in it, it does nothing.

    When any rank fails, every process of the job ends here with exit code 1 (2 where an `EvenloadError` blames the
    request); nothing after the ``with`` runs. Enter it on every rank, in the same order where there are several.

    Args:
        gone_s: a rank that has not beaten for so long is gone.
        stuck_s: the job hangs when no rank has made progress for so long. Longer than the longest step and checkpoint.
        every_s: between heartbeats; None takes 1 s, or 5 s on a file store, which keeps every beat (about 150 bytes).
    """

    def __init__(self, gone_s: float = 30.0, stuck_s: float = 300.0, every_s: float | None = None) -> None:
        self._gone_s, self._stuck_s, self._every_s = gone_s, stuck_s, every_s
        self._host = socket.gethostname()
        self._mark = self._told = Mark()
        self._tick = self._idle = self._looks = 0
        self._seen: dict[int, int] = {}
        self._missed: dict[int, int] = {}
        self._error: BaseException | None = None
        self._echo = False
        self._stop = threading.Event()
        self._ending = threading.Lock()
        self._thread: threading.Thread | None = None

    def at(self, where: str, step: int | None = None, waits: bool = False) -> None:
        """Mark progress: this rank is now at `where` (any words; the message shows them).

        Args:
            step: the optimizer step; a rank in an earlier step is behind one in a later. None: the step it was in.
            waits: from here the rank only waits for others (a collective), so it is not blamed before one that works.
        """
        self._mark = self._mark.next(where, self._mark.step if step is None else step, waits)

    def __enter__(self) -> Watchdog:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._worker = threading.get_ident()
        store = _get_default_store()
        base = store
        while isinstance(base, PrefixStore):
            base = base.underlying_store
        on_file = isinstance(base, FileStore)
        self._by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._holds_store = self._rank == 0 and not on_file and not self._by_agent
        self._every = self._every_s or (5.0 if on_file else 1.0)
        # The agent's store outlives a restarted attempt, and its keys would end the next one.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # A client of its own where there can be one: the main thread holds the other while it waits in a store call.
        clone = getattr(store, "clone", None)
        self._store = PrefixStore(f"evenload/watchdog/{attempt}/{next(_watchdogs)}", clone() if clone else store)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            get_error_handler().initialize()
        self._thread = threading.Thread(target=self._watch, name="evenload-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if error is None or isinstance(error, (SystemExit, KeyboardInterrupt)):
            self._stop.set()
            self._thread.join(timeout=_FAREWELL_S)
            return
        self._error = error
        if is_echo(error):
            self._echo = True
            self._thread.join()  # it finds the cause and ends this process
        self._post(self._own(error))

    def _watch(self) -> None:
        try:
            self._send("works")
            while not self._stop.wait(self._every):
                self._beat()
            self._send("done")
        except (RuntimeError, OSError) as error:
            self._lost_store(error)

    def _beat(self) -> None:
        self._idle = self._idle + 1 if self._mark is self._told else 0
        self._send("echo" if self._echo else "works")
        if self._store.check(["failure"]):
            self._end(Failure.decode(self._store.get("failure")))
        if self._echo:
            self._trace_echo()
        else:
            self._watch_neighbour()
            self._watch_progress()

    def _send(self, state: Literal["works", "echo", "done"]) -> None:
        self._tick += 1
        self._told = self._mark
        told = self._told._replace(waits=self._told.waits or (self._idle > 0 and self._waits()))
        self._store.set(f"beat/{self._rank}", Beat(self._host, self._tick, self._idle, state, told).encode())

    def _waits(self) -> bool:
        """Whether the worker thread is inside a collective or waits for a message: its innermost Python frame tells."""
        frame = sys._current_frames().get(self._worker)
        return frame is not None and frame.f_code.co_filename in _WAITING

    def _read(self, rank: int) -> Beat | None:
        """The newest heartbeat of a rank, if it ever beat."""
        key = f"beat/{rank}"
        return Beat.decode(self._store.get(key)) if self._store.check([key]) else None

    def _look(self, rank: int) -> Beat | None:
        """`_read`, once per own heartbeat: counts how often in a row there was nothing new."""
        beat = self._read(rank)
        tick = beat.tick if beat else 0
        fresh = self._seen.get(rank) != tick or (beat is not None and beat.state == "done")
        self._missed[rank] = 0 if fresh else self._missed[rank] + 1
        self._seen[rank] = tick
        return beat

    def _watch_neighbour(self) -> None:
        for distance in range(1, self._size):
            rank = (self._rank - distance) % self._size
            beat = self._look(rank)
            if beat is None:
                # Ranks may reach the watched part far apart: one builds a cache, the others wait for it.
                if self._missed[rank] * self._every > self._stuck_s:
                    self._post(self._gone(rank, beat))
                return
            if beat.state != "done":
                if self._missed[rank] * self._every > self._gone_s:
                    self._post(self._gone(rank, beat))
                return

    def _watch_progress(self) -> None:
        idle = round(self._stuck_s / self._every)
        if self._idle <= idle:
            return
        beats: dict[int, Beat] = {}
        for rank in range(self._size):
            beat = self._read(rank)
            if beat is None or (beat.state != "done" and rank < self._rank):
                return  # not everybody has begun, or a lower rank is there to judge
            beats[rank] = beat
        if hangs(beats, idle):
            working = {rank: beat for rank, beat in beats.items() if beat.state != "done"}
            culprit = furthest_behind(working)
            others = "the others wait for it" if len(working) > 1 else "the others are done"
            self._post(
                self._stuck(culprit, working[culprit], f"no rank made progress for {self._stuck_s:g} s; {others}")
            )

    def _trace_echo(self) -> None:
        """Find out why a collective broke: a peer gone, one that left early, or one that lags behind."""
        self._looks += 1
        beats = {rank: self._look(rank) for rank in range(self._size) if rank != self._rank}
        gone = max(beats, key=lambda rank: self._missed[rank])
        if self._missed[gone] >= _ECHO_GONE:
            self._post(self._gone(gone, beats[gone]))
        if self._looks < _ECHO_LOOKS:
            return
        for rank, beat in beats.items():
            if beat is not None and beat.state == "done":
                message = f"evenload: rank {rank} of {self._size} ({beat.host}) ended early while others still work"
                self._post(Failure("gone", rank, self._rank, message))
        working = {rank: beat for rank, beat in beats.items() if beat is not None and beat.state == "works"}
        if working:
            late = furthest_behind(working)
            self._post(self._stuck(late, working[late], "the collectives of other ranks broke or timed out meanwhile"))
        assert self._error is not None
        self._post(self._own(self._error))

    def _own(self, error: BaseException) -> Failure:
        return raised(error, self._rank, self._size, self._host, self._mark.where)

    def _gone(self, rank: int, beat: Beat | None) -> Failure:
        host, where = (beat.host, beat.mark.where) if beat else ("host unknown", "the start")
        return Failure(
            "gone",
            rank,
            self._rank,
            f"evenload: rank {rank} of {self._size} ({host}) is gone; it was last seen in '{where}'\n"
            "  found: no heartbeat; it was killed, crashed, or holds the interpreter lock\n"
            "  do: look for the out-of-memory killer in that host's kernel log, and at the end of that rank's output",
        )

    def _stuck(self, rank: int, beat: Beat, why: str) -> Failure:
        return Failure(
            "stuck",
            rank,
            rank,
            f"evenload: rank {rank} of {self._size} ({beat.host}) is stuck in '{beat.mark.where}'\n"
            f"  found: {why}\n"
            "  do: see above where it stands; if the work is just long, raise the limit `stuck_s`",
        )

    def _post(self, failure: Failure) -> NoReturn:
        """Post a failure and end behind whichever was first."""
        # The store may be lost with whoever held it; then this failure is all that is known here.
        with contextlib.suppress(RuntimeError, OSError):
            failure = Failure.decode(self._store.compare_set("failure", "", failure.encode()))
        self._end(failure)

    def _lost_store(self, error: Exception) -> None:
        if self._stop.wait(2 * self._every):
            return  # the job is ending well and the rank that held the store was faster
        if self._error is not None and not self._echo:
            self._end(self._own(self._error), store_lives=False)
        holder = "the torchrun agent" if self._by_agent else f"rank 0 of {self._size}"
        printer = int(not self._by_agent)
        what = f"{type(error).__name__} in rank {printer}, which was in '{self._mark.where}'"
        message = f"evenload: {holder} is gone, and with it the store of the job\n  found: {what}"
        self._end(Failure("gone", 0, printer, message), store_lives=False)

    def _end(self, failure: Failure, store_lives: bool = True) -> NoReturn:
        self._ending.acquire()  # whichever thread comes second stays here until the process is over
        if failure.printer == self._rank:
            print(self._here() + failure.message if failure.kind == "stuck" else failure.message, file=sys.stderr)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            if failure.rank == self._rank:
                get_error_handler().record_exception(self._error or RuntimeError(failure.message))
            else:
                time.sleep(_COURTESY_S)
        if store_lives:
            self._take_leave()
        for child in active_children():
            child.terminate()  # an orphan would keep our output open, and whoever reads it waiting
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.code)

    def _here(self) -> str:
        """Where the worker thread stands now."""
        frame = sys._current_frames().get(self._worker)
        return "".join(traceback.format_stack(frame)) if frame else ""

    def _take_leave(self) -> None:
        patience = time.monotonic() + _FAREWELL_S
        with contextlib.suppress(RuntimeError, OSError):
            ended = self._store.add("ended", 1)
            while self._holds_store and ended < self._size and time.monotonic() < patience:
                time.sleep(0.05)
                ended = self._store.add("ended", 0)
