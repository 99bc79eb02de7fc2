"""A slow rank is named, with what it is slow in; noise, unequal work and a single slow step name nobody."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from evenload.training import stragglers
from evenload.training.metrics import MeasuredStep
from evenload.training.stragglers import WINDOW, Stragglers, queued_s

RANKS = 4


def followed(num_steps, slow, *, busy_waits=False):
    """Steps of unequal work whose slowest rank ends them; ``slow(step, seconds)`` disturbs [ranks, 3] seconds, and
    returns what all wait for besides."""
    # A plane of one stage: rank and plane rank are the same.
    host = SimpleNamespace(busy_waits=busy_waits)
    job = SimpleNamespace(host=host, has_experts=False, of_ranks=lambda values: values[0])
    follower, draws = Stragglers(job, says=True), np.random.default_rng(0)
    for step in range(num_steps):
        work = draws.uniform(0.5, 1.0, RANKS)
        own = np.stack([1.7 * work, np.full(RANKS, 0.01), np.zeros(RANKS)], axis=1)
        own *= draws.uniform(0.97, 1.03, own.shape)
        exchange_s = slow(step, own) or 0.2
        step_s = float(own.sum(axis=1).max()) + exchange_s
        zeros = np.zeros((1, RANKS))
        follower.note(step, MeasuredStep(None, step_s, 0.0, 0.0, zeros, zeros, own), work[None])
    return follower


def causes(follower):
    return {(row["cause"], row["rank"]) for row in follower.rows}


def slower(rank, part, times=1.0, more_s=0.0):
    def slow(step, own):
        own[rank, part] = times * own[rank, part] + more_s

    return slow


COMPUTE, DATA = slower(2, 0, times=1.4), slower(1, 1, more_s=0.6)


@pytest.mark.parametrize(
    ("slow", "named"),
    [
        (COMPUTE, {("compute", 2)}),
        (DATA, {("data", 1)}),
        (slower(3, 2, more_s=0.5), {("host", 3)}),
        (lambda step, own: 0.2 + 0.8 * (step >= WINDOW), {("link", None)}),
        (lambda step, own: None, set()),
    ],
)
def test_a_slow_rank_is_named_with_its_cause(slow, named, caplog):
    follower = followed(3 * WINDOW, slow)
    assert causes(follower) == named
    assert len(caplog.records) == len(named)  # once, however long it lasts
    for cause, rank in named:
        assert f"{'every rank' if rank is None else f'rank {rank}'} is slow in {cause}" in caplog.text


def test_what_is_lost_is_the_time_beyond_the_others():
    (row, *_) = followed(WINDOW, DATA).rows
    assert row["lost_s"] == pytest.approx(0.6, rel=0.05)
    assert (row["first_step"], row["last_step"]) == (0, WINDOW - 1)


def test_a_single_slow_step_names_nobody():
    def once(step, own):
        own[0] += 5.0 * (step == 7)

    assert followed(2 * WINDOW, once).rows == []


def test_passes_that_hold_waiting_are_not_compared():
    assert followed(WINDOW, COMPUTE, busy_waits=True).rows == []


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux tells it")
def test_a_thread_that_waits_for_its_core_is_noticed():
    seconds = []

    def burn(note):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        start, until = queued_s(), time.perf_counter() + 0.4
        while time.perf_counter() < until:
            pass
        if note:
            seconds.append(queued_s() - start)

    child = os.fork()
    if not child:
        burn(False)
        os._exit(0)
    thread = threading.Thread(target=burn, args=(True,))
    thread.start()
    thread.join()
    os.waitpid(child, 0)
    assert seconds[0] > 0.05


def test_a_system_that_does_not_tell_is_no_reason_to_fail(monkeypatch, tmp_path):
    monkeypatch.setattr(stragglers, "_SCHEDULED", tmp_path / "nothing")
    assert queued_s() == 0.0
