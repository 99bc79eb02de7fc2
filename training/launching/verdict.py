"""When the launcher stops waiting for its ranks, and what it then says: a pure function of what it sees of them.

Ranks speak for themselves where they can (`runtime.watchdog.watchdog`). The launcher speaks where none did: a rank
killed by a signal, which it knows at once and with the very place, while others would take `safety.gone_s`; a rank that
stands still where no watchdog sees it. It never waits for processes that cannot end: stopped ones, and those that still
wait for a rank that has ended.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...core.errors import RankError
from ...core.recipe.sections import Safety
from ...runtime.watchdog.marks import CONNECTING, MEETING

SAY_S = 1.5
"""After a signal another rank may turn out to be the cause, and say so; a watchdog takes longer to miss the killed.
After a failure, the rank that prints may be another one than the first to end."""
GRACE_S = 30.0
"""After one rank has failed, the others' watchdogs have this long to end them."""
MISS_S = 10.0
"""How much longer than a rank's watchdog the launcher waits before it takes a stopped rank for the fault."""


class Rank(NamedTuple):
    """What is seen of a rank."""

    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""
    stopped: bool = False
    """It runs and does not move, by SIGSTOP or a debugger."""
    where: str | None = None
    """Its last mark; None if it has not set any."""
    name: str = ""
    """As messages name it, if not by its number alone (`core.machine.replicas.named_rank`)."""

    @property
    def meets(self) -> bool:
        """It waits for the others to come, and would wait long for one that has ended."""
        return self.where in (None, MEETING, CONNECTING)


Verdict = int | RankError
"""How a job ended: its exit code where the ranks have said why, else what the launcher has to say."""


class RankWatch:
    """Looks at the ranks again and again, every ``every_s``; time is counted in looks."""

    def __init__(self, safety: Safety, every_s: float) -> None:
        self._safety, self._every_s = safety, every_s
        self._waited_s = {"said": 0.0, "killed": 0.0, "stopped": 0.0, "done": 0.0}

    def look(self, ranks: Sequence[Rank]) -> Verdict | None:
        """The verdict, None while there is something to wait for."""
        codes = [rank.code for rank in ranks]
        living = [rank for rank in ranks if rank.code is None]
        if not any(codes) and not living:
            return 0
        said = [code for code in codes if code is not None and code > 0]
        if said:
            last = SAY_S if all(rank.stopped or rank.meets for rank in living) else GRACE_S
            over = self._waits("said", True) > last or all(rank.stopped for rank in living)
            return max(said) if over else None
        if any(codes):
            over = self._waits("killed", True) > SAY_S or not living
            return killed(ranks) if over else None
        some_stopped = any(rank.stopped for rank in living) and not all(rank.stopped for rank in ranks)
        if self._waits("stopped", some_stopped) > self._safety.gone_s + MISS_S:
            return _stopped(ranks)
        if self._waits("done", 0 in codes) > self._safety.stuck_s:
            return _endless(ranks)
        return None

    def _waits(self, what: str, lasts: bool) -> float:
        self._waited_s[what] = self._waited_s[what] + self._every_s if lasts else 0.0
        return self._waited_s[what]


def killed(ranks: Sequence[Rank], num_ranks: int | None = None) -> RankError:
    """What a launcher says where signals have ended ranks that said nothing; ``num_ranks``: of the job, where it has
    more than these."""
    size = num_ranks or len(ranks)
    killed = {_name(i, rank): rank for i, rank in enumerate(ranks) if rank.code is not None and rank.code < 0}
    if any(rank.code != -signal.SIGABRT for rank in killed.values()):  # NCCL aborts those whose peer is gone
        killed = {i: rank for i, rank in killed.items() if rank.code != -signal.SIGABRT}
    ends = [f"killed by {signal.Signals(-(rank.code or 0)).name} {_place(rank)}" for rank in killed.values()]
    do = "look for the out-of-memory killer in the kernel log, and at the end of that rank's output"
    if len(killed) == 1:
        return RankError(f"rank {next(iter(killed))} of {size} is gone: {ends[0]}", _others(ranks), do)
    what = "every rank was killed" if len(killed) == size else f"{len(killed)} of {size} ranks are gone"
    return RankError(what, _listed(zip(killed, ends, strict=True)), do)


def _stopped(ranks: Sequence[Rank]) -> RankError:
    stopped = {_name(i, rank): _place(rank) for i, rank in enumerate(ranks) if rank.stopped}
    where = "; ".join(f"rank {i} of {len(ranks)} is stopped {place}" for i, place in stopped.items())
    return RankError(where, _others(ranks), "see who sent SIGSTOP, or whether a debugger holds it")


def _endless(ranks: Sequence[Rank]) -> RankError:
    late = {_name(i, rank): rank for i, rank in enumerate(ranks) if rank.code is None}
    where = "; ".join(f"rank {i} of {len(ranks)} does not end {_place(rank)}" for i, rank in late.items())
    return RankError(where, "the other ranks are done", "look at the end of that rank's output")


def _place(rank: Rank) -> str:
    return "before it met the other ranks" if rank.where is None else f"in '{rank.where}'"


def _others(ranks: Sequence[Rank]) -> str:
    going = {_name(i, rank): rank for i, rank in enumerate(ranks) if rank.code is None and not rank.stopped}
    return _listed((name, _place(rank)) for name, rank in going.items())


def _name(number: int, rank: Rank) -> str:
    return rank.name or str(number)


def _listed(rows: Iterable[tuple[str, str]], most: int = 8) -> str:
    texts = [f"rank {i} {text}" for i, text in rows]
    return ", ".join([*texts[:most], *(["..."] if len(texts) > most else [])])
