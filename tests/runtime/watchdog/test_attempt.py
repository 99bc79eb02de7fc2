"""The ranks of a restarted attempt find each other in a store that is full of what dead ranks have written."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from evenload.core.errors import RankError
from evenload.runtime.watchdog import attempt
from evenload.runtime.watchdog.attempt import agree_on_attempt
from torch.distributed import HashStore


@pytest.fixture
def store():
    return HashStore()


def meet(store, ranks, size=3, late=()):
    """What each of these ranks takes for the name of the attempt; ``late`` ones come when the others wait already."""

    def come(rank):
        time.sleep(0.2 * (rank in late))
        return agree_on_attempt(store, rank, size, 20.0, 5.0)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(come, ranks))


def test_every_attempt_has_one_name_which_none_before_had(store):
    attempts = [meet(store, range(3), late=late) for late in ((), (0,), (1, 2), (2,))]
    assert [len(set(names)) for names in attempts] == [1] * 4
    assert len({names[0] for names in attempts}) == 4


@pytest.mark.slow
def test_ranks_that_came_and_died_before_all_agreed_are_not_waited_for_in_vain(store):
    with ThreadPoolExecutor(2) as pool:  # their words stay
        for dead in [pool.submit(agree_on_attempt, store, rank, 3, 0.3, 5.0) for rank in (0, 1)]:
            assert isinstance(dead.exception(), RankError)
    with pytest.raises(RankError, match=r"^rank 2 of 3 did not come"):
        agree_on_attempt(store, 0, 3, 0.3, 5.0)
    assert len(set(meet(store, range(3), late=(1,)))) == 1


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_asked_after_and_named_by_rank_0(store, monkeypatch, capsys):
    monkeypatch.setattr(attempt, "_ASK_S", 0.15)
    meet(store, range(3))  # the attempt before, in which it was there
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(agree_on_attempt, store, 1, 3, 0.4, 5.0)
        with pytest.raises(RankError, match=r"^rank 2 of 3 did not come") as caught:
            agree_on_attempt(store, 0, 3, 0.4, 5.0)
        assert "rank 0 waited 0.4 s" in caught.value.found
        with pytest.raises(RankError, match=r"^rank 0 of 3 did not come"):
            other.result()
    assert capsys.readouterr().err.splitlines() == [
        f"evenload: rank 2 of 3 did not come yet; rank 0 has waited {waited} s and gives up after 0.4 s"
        for waited in ("0.15", "0.3")
    ]


def test_a_store_that_does_not_answer_is_named():
    class Frozen:
        def set(self, key, value):
            threading.Event().wait(1.0)

    with pytest.raises(RankError, match="rank 1 gets no answer from the store of the job"):
        agree_on_attempt(Frozen(), 1, 2, 5.0, 0.1)
