"""However one rank fails, the job ends by itself and one message names that rank."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.cases import only_full
from harness.forge import free_port

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("watchdog_job.py")
LIMITS = {"gone_s": 10, "stuck_s": 2, "every_s": 0.2}
ENDS_WITHIN_S = 240
"""Only so that a failing test ends: what the job would wait for by itself is longer."""


def environment(limits, pg_timeout_s):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    env |= {"OMP_NUM_THREADS": "1", "LIMITS": json.dumps(LIMITS | limits), "PG_TIMEOUT_S": str(pg_timeout_s)}
    if "lo" in (name for _, name in socket.if_nameindex()):
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


@pytest.fixture
def start(forge):
    """``start(environments, *arguments)``: the job's ranks, forked from a process that has imported torch."""
    started = []

    def run(environments, *arguments):
        ranks = [forge("torch").start(JOB, *arguments, environment=environment) for environment in environments]
        started.extend(ranks)
        return ranks

    yield run
    for rank in started:
        rank.end()


def finish(ranks):
    """Exit codes and outputs of the ranks."""
    return [rank.wait(ENDS_WITHIN_S) for rank in ranks], [rank.output for rank in ranks]


@pytest.fixture
def over_a_file(start, tmp_path):
    """The ranks meet in a file, and have ended."""

    def run(how, culprit, size, pg_timeout_s=1000, **limits):
        common = environment(limits, pg_timeout_s) | {"STORE": str(tmp_path / "store"), "WORLD_SIZE": str(size)}
        return finish(start([common | {"RANK": str(rank)} for rank in range(size)], how, culprit))

    return run


@pytest.fixture
def start_over_tcp(start):
    """Rank 0 holds the store itself, as when ranks are started by hand."""

    def run(how, culprit, size, more=None, **limits):
        job = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **(more or {})}
        return start([environment(limits, 1000) | job | {"RANK": str(rank)} for rank in range(size)], how, culprit)

    return run


def wait_for(condition):
    patience = time.monotonic() + ENDS_WITHIN_S
    while not condition():
        assert time.monotonic() < patience
        time.sleep(0.05)


def the_message(outputs):
    """(rank that printed, output) of the one message of a job that did not survive."""
    assert not any("survived" in text for text in outputs)
    printers = [rank for rank, text in enumerate(outputs) if "evenload: " in text]
    assert len(printers) == 1, outputs
    text = outputs[printers[0]]
    assert text.count("evenload: ") == 1
    return printers[0], text


@pytest.mark.parametrize(
    ("how", "culprit", "codes", "message"),
    [
        ("raise", 0, [1, 1], "failed in 'step 3: forward': ValueError: bad sample 1234"),
        ("raise", 2, [1, 1, 1], "failed in 'step 3: forward': ValueError: bad sample 1234"),
        ("hang", 0, [1, 1, 1], "is stuck in 'step 3: forward'"),
        ("hang", 1, [1, 1, 1], "is stuck in 'step 3: forward'"),
        ("stands still", 0, [1, 1], "is stuck in 'converting'"),
        ("kill", 0, [-9, 1], "is gone"),
        ("kill", 2, [1, 1, -9], "is gone"),
        ("leave", 1, [1, 0], "ended early"),
    ],
)
def test_one_message_names_the_rank_that_fails_and_shows_where_it_stands(over_a_file, how, culprit, codes, message):
    found, outputs = over_a_file(how, culprit, len(codes))
    printer, text = the_message(outputs)
    assert re.search(rf"rank {culprit} of {len(codes)} \(.*\) {message}", text)
    assert found == codes
    assert (printer == culprit) == (how not in ("kill", "leave")), "a survivor speaks for who cannot"
    assert {"raise": "in misbehave", "hang": "time.sleep(1000)"}.get(how, "") in text


def test_a_hang_is_also_found_by_the_timeout_of_the_collectives(over_a_file):
    _, outputs = over_a_file("hang", 1, 3, pg_timeout_s=2, stuck_s=1000)
    printer, text = the_message(outputs)
    assert printer == 1
    assert re.search(r"rank 1 of 3 \(.*\) is stuck in 'step 3: forward'", text)


def test_a_diverging_plan_is_told_once_and_no_rank_that_only_noticed_is_blamed(over_a_file):
    codes, outputs = over_a_file("diverge", 2, 3)
    _, text = the_message(outputs)
    assert "step 3: the ranks hold different plans: rank 2 differs from the other 2" in text
    assert "failed in" not in text
    assert codes == [1, 1, 1]


def test_a_refused_request_exits_with_2_and_without_a_traceback(over_a_file):
    codes, outputs = over_a_file("refuse", 0, 2)
    _, text = the_message(outputs)
    assert "Traceback" not in text
    assert "failed in 'step 3: forward': the data ran out\n  found: 3 samples\n  do: shorten the run" in text
    assert codes == [2, 2]


@pytest.mark.parametrize("how", ["long", "child works", "reads"])
def test_a_rank_that_works_long_is_left_alone_while_another_gets_ahead(over_a_file, how):
    codes, outputs = over_a_file(how, 1, 2)
    assert codes == [0, 0], outputs
    assert [text.count("survived") for text in outputs] == [1, 1]


def test_the_rank_that_holds_the_store_stays_until_all_have_read_its_failure(start_over_tcp):
    codes, outputs = finish(start_over_tcp("raise", 0, 3))
    printer, text = the_message(outputs)
    assert printer == 0
    assert re.search(r"rank 0 of 3 \(.*\) failed in 'step 3: forward': ValueError: bad sample 1234", text)
    assert codes == [1, 1, 1]


def test_a_store_that_dies_with_its_rank_names_that_rank(start_over_tcp):
    codes, outputs = finish(start_over_tcp("kill", 0, 3))
    printer, text = the_message(outputs)
    assert printer in (1, 2), "whichever notices first"
    assert "rank 0 of 3 is gone, and with it the store of the job" in text
    assert codes[1:] == [1, 1]


@pytest.mark.parametrize("size", [only_full(2), 3])
def test_a_frozen_holder_of_the_store_is_named_by_one_rank_and_ends_when_it_goes_on(size, start_over_tcp, tmp_path):
    ranks = start_over_tcp("freeze", 0, size, {"TMPDIR": str(tmp_path)}, gone_s=3)
    codes, outputs = finish(ranks[1:])
    assert codes == [1] * (size - 1)
    assert ranks[0].poll() is None
    printers = [text for text in outputs if "evenload: " in text]
    assert len(printers) == 1, outputs
    assert printers[0].count("evenload: ") == 1
    assert list(tmp_path.iterdir()) == [], "what ranks told each other by"
    assert f"rank 0 of {size} is gone, and with it the store of the job" in printers[0]
    assert re.search(
        r"found: no answer to the heartbeats of rank \d for 3 s; rank \d is in 'step 3: gradients'", printers[0]
    )
    ranks[0].send_signal(signal.SIGCONT)
    (code,), (late,) = finish(ranks[:1])
    assert code == 1
    assert late.count("evenload: ") == 1
    assert re.search(rf"rank 0 of {size} \(.*\) was held up for \d+ s, and the others ended meanwhile", late)


def test_a_frozen_rank_is_named_by_the_one_behind_it_and_ends_when_it_goes_on(start_over_tcp):
    ranks = start_over_tcp("freeze", 1, 3, gone_s=3)
    codes, outputs = finish([ranks[0], ranks[2]])
    assert codes == [1, 1]
    assert ranks[1].poll() is None
    assert "evenload: " not in outputs[0]
    assert re.search(r"rank 1 of 3 \(.*\) is gone; it was last seen in '.*', as of its last heartbeat", outputs[1])
    ranks[1].send_signal(signal.SIGCONT)
    (code,), (late,) = finish(ranks[1:2])
    assert code == 1
    assert re.search(r"rank 1 of 3 \(.*\) was held up for \d+ s, and the others ended meanwhile", late)


def test_a_machine_that_slept_blames_nobody(start_over_tcp, tmp_path):
    """All ranks stand still for longer than any may, and go on together."""
    ready, asleep_s = tmp_path / "ready", 5
    ranks = start_over_tcp("nothing", 0, 3, {"STEPS": "400", "READY": str(ready)}, gone_s=2)
    wait_for(ready.exists)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            rank.send_signal(number)
        time.sleep(asleep_s if number == signal.SIGSTOP else 0)
    codes, outputs = finish(ranks)
    assert codes == [0, 0, 0], outputs
    assert [text.count("survived") for text in outputs] == [1, 1, 1]


def start_torchrun(env, size, how, culprit):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return subprocess.Popen(
        [*command, JOB, how, str(culprit)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("how", ["raise", only_full("hang")])
def test_torchrun_reports_the_same_culprit(how):
    agent = start_torchrun(environment({}, 1000), 2, how, 1)
    try:
        text = agent.communicate(timeout=ENDS_WITHIN_S)[0]
    finally:
        agent.kill()
        agent.wait()
    assert "survived" not in text
    assert agent.returncode != 0
    ours, _, root = text.partition("Root Cause (first observed failure):")
    assert re.search(r"evenload: rank 1 of 2 \(.*\) (failed|is stuck) in 'step 3: forward'", ours)
    assert re.search(r"rank +: 1 ", root)


@pytest.mark.parametrize("num_agents", [1, only_full(2)])
def test_torchrun_starts_a_job_again_whose_rank_was_killed(num_agents, tmp_path):
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    words = ["--nnodes", str(num_agents), "--nproc-per-node", str(2 // num_agents), "--max-restarts", "1", *meeting]
    command = [sys.executable, "-m", "torch.distributed.run", *words, JOB, "kill once", "1"]
    env = environment({}, 60) | {"KILLED": str(tmp_path / "killed")}
    outputs = [tmp_path / f"output.{agent}" for agent in range(num_agents)]
    agents = [subprocess.Popen(command, env=env, stdout=o.open("wb"), stderr=subprocess.STDOUT) for o in outputs]
    try:
        codes = [agent.wait(ENDS_WITHIN_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    text = "".join(output.read_text() for output in outputs)
    assert (tmp_path / "killed").exists()
    assert codes == [0] * num_agents, text
    assert text.count("survived") == 2
    assert "evenload: rank 0 " not in text, "the agent ends it for the other's sake"


def is_zombie(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_ranks_whose_torchrun_agent_is_frozen_end_and_one_tells(tmp_path):
    env = environment({"gone_s": 3}, 1000) | {"STEPS": "100000", "READY": str(tmp_path / "ready")}
    agent = start_torchrun(env, 2, "nothing", 0)
    try:
        wait_for((tmp_path / "ready").exists)
        agent.send_signal(signal.SIGSTOP)
        ranks = children(agent.pid)
        assert len(ranks) == 2
        wait_for(lambda: all(is_zombie(rank) for rank in ranks))  # nobody reaps them while the agent stands
        agent.send_signal(signal.SIGCONT)
        text = agent.communicate(timeout=ENDS_WITHIN_S)[0]
    finally:
        agent.kill()
        agent.wait()
    assert text.count("evenload: the torchrun agent is gone, and with it the store of the job") == 1, text
    assert text.count("evenload: ") == 1, text
    assert agent.returncode == 1
