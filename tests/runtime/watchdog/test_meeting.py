"""Ranks that meet: who does not come, or dies meanwhile, is named by one message."""

import os
import re
import socket
import threading

import pytest
from evenload.core.errors import RankError
from evenload.runtime.watchdog import meeting
from evenload.runtime.watchdog.meeting import meet
from harness.forge import free_port

JOIN = """
import os, signal, sys
import torch.distributed as dist
from evenload.runtime.world.world import close_world, init_world
rank, how = os.environ["RANK"], sys.argv[1]
if how != "nothing" and rank == "1":
    init = dist.init_process_group
    def planted(*arguments, **named):
        os.kill(os.getpid(), getattr(signal, how))
    dist.init_process_group = planted
close_world(init_world(float(sys.argv[2]), gone_s=2.0))
print("met")
"""


@pytest.fixture
def port():
    return free_port()


def test_a_store_that_is_not_there_is_asked_after_and_then_no_more(port, monkeypatch, capsys):
    monkeypatch.setattr(meeting, "_ASK_S", 0.15)
    with pytest.raises(RankError, match=r"rank 1 waited 0\.5 s for rank 0, which holds the store of the job") as caught:
        meet("gloo", 1, 2, "127.0.0.1", port, timeout_s=0.5, gone_s=5)
    assert "Connection refused" in caught.value.found
    assert re.search(rf"no store at 127.0.0.1:{port} yet \(.*\); rank 1 has waited \d s", capsys.readouterr().err)


def test_an_attempt_writes_under_its_own_name_alone(port, monkeypatch):
    """The agent's store outlives an attempt: under one name a rank would read the addresses of dead ones."""
    written = []
    monkeypatch.setattr(meeting.dist, "init_process_group", lambda *_, store, **__: store.set("address", "here"))
    monkeypatch.setattr(meeting, "attempt", lambda: "second")
    opened = meeting._connect
    monkeypatch.setattr(meeting, "_connect", lambda *a: written.append(opened(*a)) or written[0])
    meet("gloo", 0, 1, "127.0.0.1", port, timeout_s=5, gone_s=5)
    assert written[0].check(["default_pg/second/address"])


def test_an_address_that_does_not_exist_is_named(port):
    with pytest.raises(RankError) as caught:
        meet("gloo", 1, 2, "nowhere.invalid", port, timeout_s=0.1, gone_s=5)
    assert caught.value.found.startswith(f"nowhere.invalid:{port}: ")


def test_a_port_that_another_program_has_is_named_by_both_sides(port):
    with socket.create_server(("127.0.0.1", port)) as silent:
        with pytest.raises(RankError, match="rank 1 cannot reach the store of the job") as caught:
            meet("gloo", 1, 2, "127.0.0.1", port, timeout_s=5, gone_s=0.3)
        assert caught.value.found == "somebody listens there, and does not answer in 0.3 s"
        with pytest.raises(RankError, match="rank 0 cannot open the store of the job") as caught:
            meet("gloo", 0, 2, "127.0.0.1", port, timeout_s=5, gone_s=5)
        assert "address already in use" in caught.value.found
        silent.close()
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("evenload"))


@pytest.fixture
def join(forge, port, tmp_path):
    """``join([0, 1], 3, "SIGKILL", 4.0)`` starts ranks 0 and 1 of 3; rank 1 gets this signal while it connects."""
    script, started = tmp_path / "join.py", []
    script.write_text(JOIN)

    def run(ranks, size, how, timeout_s):
        job = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started.extend(
            forge("torch").start(script, how, timeout_s, environment=job | {"RANK": str(rank)}) for rank in ranks
        )
        return started

    yield run
    for rank in started:
        rank.end()


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(join):
    (rank,) = join([0], 2, "nothing", 4)
    assert rank.wait(100) == 1
    assert rank.output.count("evenload: ") == 1, rank.output
    assert re.search(r"evenload: rank 1 of 2 did not come\n  found: no heartbeat of it in \d s", rank.output)
    assert "Traceback" not in rank.output


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_or_freezes_while_the_others_connect_is_named_once(how, join):
    ranks = join([0, 1, 2], 3, how, 100)
    assert [ranks[rank].wait(100) for rank in (0, 2)] == [1, 1]
    messages = ranks[0].output + ranks[2].output
    assert messages.count("evenload: ") == 1, messages
    assert re.search(
        r"rank 1 of 3 \(.*\) is gone; it was last seen in '(the start|connecting to the other rank)", messages
    )
    assert "Traceback" not in messages
