"""Who is blamed, decided from heartbeats alone; and which errors are only echoes."""

import pytest
import torch.distributed as dist
from evenload.core.errors import EvenloadError, RankError
from evenload.runtime.watchdog.failure import Failure, is_echo, raised
from evenload.runtime.watchdog.peers import Beat, Mark, furthest_behind, hangs
from evenload.runtime.watchdog.watchdog import Watchdog

START = Mark()


def beat(idle=0, state="works", mark=START):
    return Beat("host", 1, idle, state, mark)


def after(*marks):
    mark = Mark()
    for where, step, waits in marks:
        mark = mark.next(where, step, waits)
    return beat(mark=mark)


def test_the_earliest_step_is_behind():
    assert furthest_behind({0: after(("a", 3, False)), 1: after(*[("a", 2, True)] * 9), 2: after(("a", 3, False))}) == 1


def test_a_rank_that_works_is_behind_one_that_waits_though_it_set_more_marks():
    waiting = after(("micro-batch 0", 5, False), ("gradients", 5, True))
    working = after(*[(f"micro-batch {i}", 5, False) for i in range(7)])
    assert furthest_behind({0: waiting, 1: working, 2: waiting}) == 1


def test_fewest_marks_are_behind_and_the_lowest_rank_breaks_ties():
    one, two = after(("a", 1, False)), after(("a", 1, False), ("b", 1, False))
    assert furthest_behind({0: two, 1: one, 2: one}) == 1


def test_a_job_hangs_only_when_nobody_who_is_left_moves():
    assert hangs({0: beat(11), 1: beat(12)}, 10)
    assert hangs({0: beat(11), 1: beat(0, "done")}, 10)
    assert not hangs({0: beat(500), 1: beat(10)}, 10)


def test_messages_survive_the_store():
    one = beat(3, "echo", Mark(4, True, 5, 'a "place"'))
    assert Beat.decode(one.encode().encode()) == one
    failure = Failure("raised", 1, 2, "what\nhow", 2)
    assert Failure.decode(failure.encode().encode()) == failure


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
