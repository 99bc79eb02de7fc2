"""Whom a rank blames for what it reads, heartbeat by heartbeat, from a store in memory."""

import pytest
import torch.distributed as dist
from evenload.core.errors import EvenloadError, RankError
from evenload.runtime.watchdog import marks
from evenload.runtime.watchdog.failure import is_echo, raised
from evenload.runtime.watchdog.peers import ECHO_GONE, Beat, Mark, Peers, furthest_behind, hangs
from evenload.runtime.watchdog.store_client import StoreClient
from evenload.runtime.watchdog.watchdog import Watchdog
from torch.distributed import HashStore

GONE_S, STUCK_S = 10.0, 20.0


class Job:
    """A store, and what its ranks write there."""

    def __init__(self):
        self.store = HashStore()

    def beats(self, rank, tick, idle=0, state="works", where="forward", waits=False):
        beat = Beat("node", tick, idle, state, Mark(where=where, waits=waits))
        self.store.set(f"beat/{rank}", beat.encode())

    def seen_by(self, rank, size):
        return Peers(StoreClient(lambda: self.store), rank, size, GONE_S, STUCK_S, every_s=1.0)


def looks(look, times):
    """How many looks came to nothing, and what the next one said."""
    for number in range(times):
        if failure := look():
            return number, failure
    return times, None


def test_a_neighbour_is_gone_after_so_many_heartbeats_without_one_of_its_own():
    job = Job()
    peers = job.seen_by(2, 3)
    job.beats(1, 1)
    number, failure = looks(peers.neighbour, 100)
    assert number == GONE_S + 1
    assert failure[:3] == ("gone", 1, 2)
    assert "rank 1 of 3 (node) is gone; it was last seen in 'forward', as of its last heartbeat" in failure.message


def test_a_neighbour_that_beats_again_is_not_gone():
    job = Job()
    peers = job.seen_by(1, 2)
    for tick in range(5):
        job.beats(0, tick)
        assert looks(peers.neighbour, int(GONE_S)) == (int(GONE_S), None)


def test_where_a_launcher_keeps_marks_the_very_place_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(marks.MARKS, str(tmp_path))
    marks.MarkFile(tmp_path, 1).write("update")
    job = Job()
    job.beats(1, 1)
    _, failure = looks(job.seen_by(0, 2).neighbour, 100)
    assert "rank 1 of 2 (node) is gone; it was in 'update'\n" in failure.message


def test_one_that_never_came_is_asked_after_and_waited_for_longer(capsys, monkeypatch):
    monkeypatch.setattr("evenload.runtime.watchdog.peers._ASK_S", 4.0)
    number, failure = looks(Job().seen_by(0, 2).neighbour, 100)
    assert number == STUCK_S + 1
    assert "rank 1 of 2 did not come\n  found: no heartbeat of it in 21 s" in failure.message
    asked = capsys.readouterr().err.splitlines()
    assert [line.split("for it ")[1].split(" and")[0] for line in asked] == ["4 s", "8 s", "16 s"]


def test_a_rank_that_is_done_is_looked_past():
    job = Job()
    job.beats(1, 1, state="done")
    job.beats(0, 1)
    _, failure = looks(job.seen_by(2, 3).neighbour, 100)
    assert failure.rank == 0
    job.beats(0, 2, state="done")
    assert looks(job.seen_by(2, 3).neighbour, 50) == (50, None)


def test_only_the_lowest_rank_at_work_judges_a_hang_and_blames_the_one_that_does_not_wait():
    job = Job()
    limit = int(STUCK_S)
    job.beats(0, 1, state="done")
    job.beats(1, 1, idle=limit + 1, waits=True)
    job.beats(2, 1, idle=limit + 1)
    assert job.seen_by(1, 3).progress(limit) is None
    assert job.seen_by(2, 3).progress(limit + 1) is None
    failure = job.seen_by(1, 3).progress(limit + 1)
    assert failure[:3] == ("stuck", 2, 2)
    assert "no rank made progress for 20 s; the others wait for it" in failure.message
    job.beats(2, 2, idle=3)
    assert job.seen_by(1, 3).progress(limit + 1) is None


def test_after_a_broken_connection_the_one_that_stopped_beating_is_gone_soon():
    job = Job()
    peers = job.seen_by(0, 3)
    job.beats(1, 1)
    for tick in range(ECHO_GONE):
        job.beats(2, tick + 1)
        peers.look_at_all()
        assert peers.gone(came=False) is None
    job.beats(2, 99)
    peers.look_at_all()
    assert peers.gone(came=False)[:3] == ("gone", 1, 0)


def test_a_rank_that_has_not_come_yet_is_gone_only_where_a_connection_broke():
    peers = Job().seen_by(0, 2)
    for _ in range(2 * ECHO_GONE):
        peers.look_at_all()
    assert peers.gone(came=True) is None
    assert "rank 1 of 2 did not come" in peers.gone(came=False).message


def test_while_all_beat_the_one_that_left_or_lags_is_blamed():
    job = Job()
    job.beats(1, 1, state="echo")
    job.beats(2, 1, state="works", where="backward")
    peers = job.seen_by(0, 3)
    assert "rank 2 of 3 (node) is stuck in 'backward'" in peers.behind(peers.look_at_all()).message
    job.beats(2, 2, state="done")
    assert "rank 2 of 3 (node) ended early" in peers.behind(peers.look_at_all()).message
    job.beats(2, 3, state="echo")
    assert peers.behind(peers.look_at_all()) is None


START = Mark()


def beat(idle=0, state="works", mark=START):
    return Beat("host", 1, idle, state, mark)


def after(*marks):
    mark = Mark()
    for where, step, waits in marks:
        mark = mark.next(where, step, waits)
    return beat(mark=mark)


A, WAITS = ("a", 5, False), ("gradients", 5, True)


@pytest.mark.parametrize(
    ("marks", "behind"),
    [
        ([[("a", 3, False)], [("a", 2, True)] * 9, [("a", 3, False)]], 1),  # the earliest step
        ([[A, WAITS], [A] * 7, [A, WAITS]], 1),  # who works, though it set more marks than those that wait
        ([[A, A], [A], [A]], 1),  # the fewest marks, and the lowest rank
    ],
)
def test_who_is_furthest_behind(marks, behind):
    assert furthest_behind({rank: after(*of_rank) for rank, of_rank in enumerate(marks)}) == behind


def test_a_job_hangs_only_when_nobody_who_is_left_moves():
    assert hangs({0: beat(11), 1: beat(12)}, 10)
    assert hangs({0: beat(11), 1: beat(0, "done")}, 10)
    assert not hangs({0: beat(500), 1: beat(10)}, 10)


def wrapped(ulysses_degree):
    try:
        raise ulysses_degree
    except Exception as error:
        outer = ValueError("while saving")
        outer.__cause__ = error
        return outer


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:542] Connection closed by peer [127.0.0.1]:4"), True),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error in: ..."), True),
        (wrapped(RuntimeError("Connection closed by peer")), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("Connection closed by peer"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (RankError("step 3: the ranks hold different plans"), False),
    ],
)
def test_echoes_are_told_from_causes(error, echo):
    assert is_echo(error) == echo


def test_a_raised_error_is_told_with_rank_place_and_traceback():
    try:
        raise KeyError("weight")
    except KeyError as error:
        failure = raised(error, 3, 8, "node7", "step 2: forward")
    assert failure[:3] == ("raised", 3, 3)
    assert failure.message.startswith("Traceback")
    assert failure.message.endswith("evenload: rank 3 of 8 (node7) failed in 'step 2: forward': KeyError: 'weight'")
    assert failure.code == 1


def test_our_own_errors_need_no_traceback_and_blame_the_request_or_the_ranks():
    request = raised(EvenloadError("no data", "0 files", "name a folder"), 0, 2, "h", "w")
    assert "Traceback" not in request.message
    assert request.message.splitlines()[1:] == ["  found: 0 files", "  do: name a folder"]
    assert request.code == 2
    ranks = raised(RankError("step 3: the ranks hold different plans"), 0, 2, "h", "w")
    assert "rank 0" not in ranks.message
    assert ranks.code == 1


def test_alone_the_watchdog_stays_out_of_the_way():
    with pytest.raises(KeyError), Watchdog():
        raise KeyError
