"""End the whole job, with one message that names the right rank, as soon as one rank fails, dies or hangs.

Left alone, a dead rank shows up in its peers as "Connection closed by peer", a hung one as nothing for half an hour.
So every rank runs two threads next to its work; the work itself gains no collective. One beats on the job's store and
judges what it reads there:

* A rank that raises posts its failure; the first post wins, all others end quietly after it.
* A rank without a heartbeat for `gone_s` is gone: killed, stopped, or inside a call that holds the interpreter lock.
  Each rank watches the nearest lower rank that still works, so the cost per rank does not grow with the job.
* If no rank has made progress for `stuck_s` the job hangs. `at` marks progress, and inside `working` CPU time and bytes
  are progress too (`evidence`). The culprit is the rank furthest behind; of ranks that stand at one place, as they do
  in a ring, one that is not inside a collective and waits for no message. A rank that computes for long is not stuck as
  long as any other gets ahead within `stuck_s`.
* An error that only says that a peer went away is not blamed: the rank holds still and looks at all the others.

The other thread guards the first, whose calls block for ever if the holder of the store is frozen: without an answer
for `gone_s` the holder is gone. Ranks cannot agree then who prints, so the first that notices on each node does.

Time is counted in the threads' own wake-ups, not by the clock: a machine that slept, or a watcher that was held up
itself, blames nobody; a rank that was held up while the others ended says so and ends too. One process prints: the
culprit if it can, with its traceback or the place where it hangs, otherwise the rank that noticed. Under torchrun the
culprit's error also becomes the root cause in torchrun's own report.

By hand, since nobody else names the culprit: torchrun sees processes that have ended, NCCL's watchdog its own
collectives, and gloo waits for its timeout.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Literal, NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ..world.agreement import rank_and_size
from ..world.plane import Pending
from ..world.replicas import JobGroup, job_group, named
from . import failure as failures
from . import marks
from .attempt import attempt
from .ending import end_process, first_here, take_leave
from .evidence import Meter
from .failure import Failure, is_echo
from .peers import Beat, Mark, Peers
from .store_client import StoreClient, StoreLostError, within

_ECHO_LOOKS = 8
"""Looks at all peers after which a broken connection is explained by their progress, since all of them beat."""
_POST_S = 5.0
"""How long a failure may take to be posted."""
_LAST_BEAT_S = 10.0
"""How long the last heartbeat may take where all went well."""

_WAITING = {one.__code__.co_filename for one in (_get_default_store, Pending.wait, JobGroup.everyone)}
"""Files whose functions wait for other ranks."""

_watchdogs = itertools.count()
_current: Watchdog | None = None
"""Of this process; a process has one rank."""


class JobRanks(NamedTuple):
    """The ranks of a job before there is a process group."""

    store: Store
    rank: int
    size: int


class Watchdog:
    """Context manager around the work of one rank; without a process group, or alone in it, it does nothing.

    When any rank fails, every process of the job ends here with exit code 1 (2 where an `EvenloadError` blames the
    request); nothing after the ``with`` runs. Enter it on every rank, in the same order where there are several.

    Args:
        gone_s: a rank that has not beaten for so long is gone.
        stuck_s: the job hangs when no rank has made progress for so long. Longer than the longest step; what takes
            longer goes into `working`.
        every_s: between heartbeats; None takes 1 s, or 5 s on a file store, which keeps every beat (about 150 bytes).
        members: None takes the job, which is the default process group unless it has replicas.
    """

    def __init__(
        self,
        gone_s: float = 30.0,
        stuck_s: float = 300.0,
        every_s: float | None = None,
        members: JobRanks | None = None,
    ) -> None:
        self._gone_s = gone_s
        self._stuck_s = stuck_s
        self._every_s = every_s
        self._members = members
        self._host = socket.gethostname()
        self._mark = self._sent = Mark()
        self._mark_file = marks.own()
        self._meter: Meter | None = None
        self._tick = self._idle = self._looks = 0
        self._error: BaseException | None = None
        self._echo = False
        self._suspended_s = 0.0
        self._job_id = ""
        self._beats = threading.Event()
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
        if self._mark_file is not None:
            self._mark_file.write(self._mark.where)

    @contextmanager
    def working(self, where: str, step: int | None = None) -> Iterator[None]:
        """Around work that takes long and sets no marks: CPU time and bytes of this process and its children are
        progress meanwhile, unless the rank waits in a collective. The mark before comes back where all went well."""
        before, meter = self._mark, self._meter
        self.at(where, step)
        self._meter = Meter()
        try:
            yield
        finally:
            self._meter = meter
        self.at(before.where, waits=before.waits)

    def __enter__(self) -> Watchdog:
        global _current
        self._before, _current = _current, self
        members = self._members
        if members is None and dist.is_initialized():
            job = job_group()
            own = (job.store, job.rank, job.size) if job else (_get_default_store(), *rank_and_size())
            members = JobRanks(*own)
        if members is None or members.size == 1:
            return self
        store, self._rank, self._size = members
        self._worker = threading.get_ident()
        base = store
        while isinstance(base, PrefixStore):
            base = base.underlying_store
        on_file = isinstance(base, FileStore)
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._holder = None if on_file or by_agent else 0
        self._holder_name = "the file of the store" if on_file else "the torchrun agent"
        self._every = self._every_s or (5.0 if on_file else 1.0)
        # The agent's store outlives a restarted attempt, and its keys would end the next one.
        prefix = f"evenload/watchdog/{attempt()}/{next(_watchdogs)}"
        # A client of its own where there can be one: the main thread holds the other while it waits in a store call.
        clone = getattr(store, "clone", lambda: store)
        self._store = StoreClient(lambda: PrefixStore(prefix, clone()))
        self._peers = Peers(self._store, self._rank, self._size, self._gone_s, self._stuck_s, self._every)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            get_error_handler().initialize()
        self._thread = threading.Thread(target=self._watch, name="evenload-watchdog", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="evenload-watchdog-guard", daemon=True).start()
        # A rank that dies before its first heartbeat looks like one that is still to come, for which others wait long.
        self._beats.wait(self._gone_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        _current = self._before
        if self._thread is None:
            return
        if error is None or isinstance(error, (SystemExit, KeyboardInterrupt)):
            self._stop.set()
            self._thread.join(timeout=_LAST_BEAT_S)
            return
        self._error = error
        if is_echo(error):
            self._echo = True
            self._thread.join()  # it finds the cause and ends this process, and the guard does if it cannot
        self._post(self._own(error))

    def _watch(self) -> None:
        try:
            self._send("works")
            self._beats.set()
            self._job_id = self._store.claim("id", uuid.uuid4().hex).decode()
            while not self._stop.wait(self._every):
                self._beat()
            self._send("done")
        except StoreLostError as error:
            # Where the job is ending well, the rank that held the store may have been faster.
            if not self._stop.wait(2 * self._every):
                self._lost_store(str(error))
        except Exception as error:  # our own mistake; a job that nobody watches could hang for ever
            self._post(self._own(error))

    def _guard(self) -> None:
        """End the job where the other thread cannot, since the store does not answer it."""
        answers, silent, woke_s = 0, 0, time.monotonic()
        while not self._stop.wait(self._every):
            passed_s, woke_s = time.monotonic() - woke_s, time.monotonic()
            if passed_s > self._gone_s:
                self._suspended_s = passed_s
            silent = silent + 1 if self._store.answers == answers else 0
            answers = self._store.answers
            if silent * self._every > self._gone_s:
                self._lost_store(f"no answer to the heartbeats of rank {self._rank} for {self._gone_s:g} s")

    def _beat(self) -> None:
        self._idle = self._idle + 1 if self._mark is self._sent and not self._works() else 0
        self._send("echo" if self._echo else "works")
        posted = self._store.get("failure")
        if posted is not None:
            self._end(Failure.decode(posted))
        if self._echo or self._suspended_s:
            self._trace()
        elif blamed := self._peers.neighbour() or self._peers.progress(self._idle):
            self._post(blamed)

    def _send(self, state: Literal["works", "echo", "done"]) -> None:
        self._tick += 1
        self._sent = self._mark
        mark = self._sent._replace(waits=self._sent.waits or (self._idle > 0 and self._waits()))
        self._store.set(f"beat/{self._rank}", Beat(self._host, self._tick, self._idle, state, mark).encode())

    def _works(self) -> bool:
        """Whether there is evidence of work in a phase without marks."""
        meter = self._meter
        return meter is not None and meter.works() and not self._waits()

    def _waits(self) -> bool:
        """Whether the worker thread is inside a collective or waits for a message: its innermost Python frame tells."""
        frame = sys._current_frames().get(self._worker)
        return frame is not None and frame.f_code.co_filename in _WAITING

    def _trace(self) -> None:
        """Find out why a collective broke, or whether the others went on while this rank was held up."""
        self._looks += 1
        beats = self._peers.look_at_all()
        if gone := self._peers.gone(came=self._error is None):
            self._post(self._suspended() if self._suspended_s else gone)
        if self._looks < _ECHO_LOOKS:
            return
        if self._error is None:  # the others were held up as well: the whole machine slept
            self._suspended_s, self._looks = 0.0, 0
            return
        self._post(self._peers.behind(beats) or self._own(self._error))

    def _own(self, error: BaseException) -> Failure:
        return failures.raised(error, self._rank, self._size, self._host, self._mark.where)

    def _suspended(self) -> Failure:
        return failures.suspended(self._rank, self._size, self._host, self._mark.where, self._suspended_s)

    def _post(self, failure: Failure) -> NoReturn:
        first = within(_POST_S, lambda: Failure.decode(self._store.claim("failure", failure.encode())))
        if first is None:  # the store is lost or silent: this failure is all that is known here
            self._end(failure._replace(printer=self._rank), store_answers=False)
        self._end(first)

    def _lost_store(self, why: str) -> NoReturn:
        if self._error is not None and not self._echo:
            self._end(self._own(self._error), store_answers=False)
        if self._suspended_s:
            self._end(self._suspended(), store_answers=False)
        name, last_seen = self._holder_name, ""
        if self._holder is not None:
            name, last_seen = f"rank {named(self._holder)} of {self._size}", self._peers.last_seen(self._holder)
        printer = self._rank if first_here(self._job_id) else -1
        why = f"{why}; rank {self._rank} is in '{self._mark.where}'"
        rank = -1 if self._holder is None else self._holder
        self._end(failures.store_lost(rank, printer, name, last_seen, why), store_answers=False)

    def _end(self, failure: Failure, store_answers: bool = True) -> NoReturn:
        self._ending.acquire()  # whichever thread comes second stays here until the process is over
        text = failure.message if failure.printer == self._rank else ""
        if text and failure.kind == "stuck":
            frame = sys._current_frames().get(self._worker)
            text = "".join(traceback.format_stack(frame) if frame else ()) + text
        culprit = (self._error or RuntimeError(failure.message)) if failure.rank == self._rank else None
        # A rank that is gone reads nothing any more.
        others = self._size - (failure.kind == "gone" and failure.rank not in (-1, self._rank))
        farewell = partial(take_leave, self._store, waits=self._rank == self._holder, num_ranks=others)
        end_process(text, culprit, failure.code, farewell if store_answers else None)


def working(where: str) -> AbstractContextManager[None]:
    """`Watchdog.working` of the watchdog that watches this process, if one does."""
    return _current.working(where) if _current is not None else nullcontext()
