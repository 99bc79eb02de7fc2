"""When the launcher stops waiting, and what it says: from what it sees of the ranks, look by look."""

import pytest
from evenload.core.recipe.sections import Safety
from evenload.runtime.watchdog.marks import CONNECTING, MEETING
from evenload.training.launching.verdict import GRACE_S, MISS_S, SAY_S, Rank, RankWatch

SAFETY = Safety(gone_s=5.0, stuck_s=50.0)
WORKS = Rank(where="forward")
MEETS = Rank(where=MEETING)
CONNECTS = Rank(where=CONNECTING)
FROZEN = Rank(stopped=True, where="update")
WELL, FAILED, REFUSED = Rank(0, where="end"), Rank(1, where="forward"), Rank(2, where="start-up")
KILLED = Rank(-9, where="update")
EVERY_S = 0.5


def verdict_on(*ranks, most_s=1000.0):
    """(seconds of looking, verdict) on ranks that stay as they are."""
    watch = RankWatch(SAFETY, EVERY_S)
    for number in range(int(most_s / EVERY_S)):
        if (verdict := watch.look(ranks)) is not None:
            return number * EVERY_S, verdict
    return most_s, None


@pytest.mark.parametrize(
    ("ranks", "after_s", "code"),
    [
        ((WELL, WELL), 0.0, 0),
        ((FAILED, REFUSED), 0.0, 2),
        ((FAILED, WELL), 0.0, 1),
        ((FAILED, FROZEN), 0.0, 1),
        ((FAILED, MEETS, FROZEN), SAY_S, 1),
        ((FAILED, CONNECTS), SAY_S, 1),
        ((REFUSED, Rank()), SAY_S, 2),
        ((FAILED, WORKS, FROZEN), GRACE_S, 1),
        ((KILLED, FAILED), 0.0, 1),
    ],
)
def test_what_ranks_said_themselves_is_not_said_again(ranks, after_s, code):
    waited_s, verdict = verdict_on(*ranks)
    assert waited_s == after_s
    assert verdict == code


@pytest.mark.parametrize(
    ("ranks", "after_s", "what", "values"),
    [
        ((WORKS, KILLED), SAY_S, "rank 1 of 2 is gone: killed by SIGKILL in 'update'", "rank 0 in 'forward'"),
        (
            (MEETS, Rank(-9)),
            SAY_S,
            "rank 1 of 2 is gone: killed by SIGKILL before it met the other ranks",
            f"'{MEETING}'",
        ),
        ((KILLED,), 0.0, "rank 0 of 1 is gone: killed by SIGKILL in 'update'", ""),
        ((KILLED, Rank(-11)), 0.0, "every rank was killed", "rank 1 killed by SIGSEGV before it met the other ranks"),
        (
            (KILLED, KILLED, WORKS),
            SAY_S,
            "2 of 3 ranks are gone",
            "rank 0 killed by SIGKILL in 'update', rank 1 killed",
        ),
        ((Rank(-6, where="forward"), KILLED, Rank(-6)), 0.0, "rank 1 of 3 is gone: killed by SIGKILL in 'update'", ""),
        ((Rank(-6, where="forward"), WORKS), SAY_S, "rank 0 of 2 is gone: killed by SIGABRT in 'forward'", ""),
        ((WORKS, FROZEN), SAFETY.gone_s + MISS_S, "rank 1 of 2 is stopped in 'update'", "rank 0 in 'forward'"),
        ((WELL, FROZEN), SAFETY.gone_s + MISS_S, "rank 1 of 2 is stopped in 'update'", ""),
        ((WELL, WORKS), SAFETY.stuck_s, "rank 1 of 2 does not end in 'forward'", "the other ranks are done"),
    ],
)
def test_what_no_rank_can_say_the_launcher_says(ranks, after_s, what, values):
    waited_s, verdict = verdict_on(*ranks)
    assert waited_s == after_s
    assert verdict.what == what
    assert values in verdict.found


@pytest.mark.parametrize("ranks", [(WORKS, WORKS), (FROZEN, FROZEN), (MEETS, Rank())])
def test_ranks_that_work_or_were_all_stopped_together_are_waited_for(ranks):
    assert verdict_on(*ranks) == (1000.0, None)


def test_a_rank_that_speaks_shortly_after_a_kill_is_the_one_that_is_believed():
    watch = RankWatch(SAFETY, EVERY_S)
    assert watch.look((WORKS, Rank(-6))) is None
    assert watch.look((FAILED, Rank(-6))) == 1


def test_a_rank_that_goes_on_after_a_stop_is_not_the_fault():
    watch = RankWatch(SAFETY, EVERY_S)
    for _ in range(5):
        for _ in range(int(SAFETY.gone_s / EVERY_S)):
            assert watch.look((WORKS, FROZEN)) is None
        assert watch.look((WORKS, WORKS)) is None
