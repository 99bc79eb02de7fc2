"""The way out of a process waits for nothing without a limit, and one rank of a node speaks for all."""

import os
import threading

import pytest
from evenload.runtime.watchdog import ending, marks
from evenload.runtime.watchdog.ending import first_here, take_leave
from evenload.runtime.watchdog.store_client import StoreClient, StoreLostError, within
from torch.distributed import HashStore

NEVER_S = 1000.0


def test_what_comes_back_is_returned_and_what_fails_or_does_not_come_back_is_left():
    assert within(NEVER_S, lambda: 3) == 3
    assert within(NEVER_S, lambda: 1 // 0) is None
    assert within(0.05, lambda: threading.Event().wait(NEVER_S)) is None


class Broken:
    def set(self, key, value):
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_fails_is_lost_and_does_not_count_as_an_answer():
    client = StoreClient(Broken)
    with pytest.raises(StoreLostError, match="RuntimeError: Connection reset by peer"):
        client.set("key", "value")
    assert client.answers == 0


def test_every_answer_is_counted():
    client = StoreClient(HashStore)
    client.set("key", "value")
    assert client.get("key") == b"value"
    assert client.get("none") is None
    assert client.claim("first", "a") == client.claim("first", "b") == b"a"
    assert client.count("sum", 2) == 2
    assert client.answers == 7


def test_whoever_holds_the_store_waits_until_all_have_left_it():
    store = HashStore()
    client = StoreClient(lambda: store)
    left = []

    def leave():
        take_leave(client, waits=False, num_ranks=3)
        left.append(client.count("ended", 0))

    others = [threading.Timer(0.1 * number, leave) for number in (1, 2)]
    for other in others:
        other.start()
    take_leave(client, waits=True, num_ranks=3)
    assert client.count("ended", 0) == 3
    for other in others:
        other.join()
    assert len(left) == 2


def test_it_does_not_wait_for_a_rank_that_is_gone_or_for_ranks_that_stopped_coming(monkeypatch):
    client = StoreClient(HashStore)
    take_leave(client, waits=True, num_ranks=1)
    monkeypatch.setattr(ending, "_STRAGGLE_S", 0.1)
    take_leave(client, waits=True, num_ranks=9)
    assert client.count("ended", 0) == 2


@pytest.mark.parametrize("place", ["launcher", "torchrun", "system"])
def test_the_first_of_a_node_that_asks_speaks(place, tmp_path, monkeypatch):
    monkeypatch.delenv(marks.MARKS, raising=False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if place == "launcher":
        monkeypatch.setenv(marks.MARKS, str(tmp_path))
    elif place == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "3" / "error.json"))
    else:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert [first_here("a"), first_here("a"), first_here("b"), first_here("")] == [True, False, True, True]
    assert sorted(os.listdir(tmp_path)) == ["evenload-a", "evenload-b"]
    claims = [tmp_path / "evenload-a", tmp_path / "evenload-b"]
    assert ending._claims == (claims if place == "system" else []), "to be taken away by whom nobody clears up for"
    ending._claims.clear()


def test_where_nobody_can_know_who_is_first_all_speak(tmp_path, monkeypatch):
    monkeypatch.setenv(marks.MARKS, str(tmp_path / "missing"))
    assert first_here("a")
    assert first_here("a")
