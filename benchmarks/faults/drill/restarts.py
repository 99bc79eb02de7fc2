"""A rank is killed under ``torchrun --max-restarts 2``, by one agent or by two, and the job is to go on by itself.

The moments are those of `MOMENTS`. The fault happens once, in whichever attempt comes first there.

`resized` is a job that grows and shrinks: under ``torchrun --nnodes 1:3`` two agents of a rank each train, a third one
joins them, and is killed with its rank. ``parallel.dp`` is null, and every change goes through the last checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cases import BY_NAME, SMALL
from runs import CONVERTED, LIMIT_S, PACKAGE, Row, code_of, compared, environment, killed, started, steps_of

MOMENTS = ("start", "meeting", "build", "plan", "forward", "update", "compare", "save", "save, later", "end")


RESIZED = ("parallel.dp=null", "train.steps=60", "train.global_batch_size=32")
"""A job of as many ranks as there are, long enough for agents to come and go."""
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else torch 2.13's agents keep the first attempt's store, whose address one that joins later never hears."""
RESIZED_CASE = "resized: a third agent joins two, and is killed"
SOON = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"
"""Seconds that agents wait for others to join, and for a silent one; torchrun's defaults are 30 and 15."""


def arguments_of(place: Path) -> list[str]:
    """A small run of two ranks with a checkpoint every other step."""
    kept = (f"checkpoint.dir={place}/kept", f"log.jsonl={place}/log.jsonl", "plugins.packing.max_tokens=1024")
    return ["-m", "evenload", "train", str(PACKAGE / "recipes" / "quickstart.yaml"), *SMALL, *kept]


def start_agents(num_agents: int, place: Path, fault: dict[str, Any] | None) -> list[subprocess.Popen[bytes]]:
    """The agents of one job of two ranks."""
    env = environment(place / "plants", fault)
    command = command_of(place, "--nnodes", str(num_agents), "--nproc-per-node", str(2 // num_agents))
    return [started(command, env, place / f"output.{agent}", place) for agent in range(num_agents)]


def command_of(place: Path, *words: str) -> list[str]:
    """Of every agent of a job, which meet at a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", place.name]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "2", *meeting, *words]
    return [*torchrun, *arguments_of(place)]


def codes_of(agents: list[subprocess.Popen[bytes]], place: Path) -> list[int | None]:
    """Exit codes of all agents; None for one that had to be killed."""
    codes = [code_of(agent) for agent in agents]
    for agent in agents:
        killed(agent.pid, place)
    return codes


def run(moment: str, num_agents: int, folder: Path, reference: Path) -> dict[str, Any]:
    """One kill of rank 1, compared with the undisturbed run whose log ``reference`` is."""
    place = folder / f"{moment.replace(', ', '-')}-{num_agents}"
    phase, stamp = BY_NAME[moment], place / "stamp"
    fault = {"rank": 1, "how": "kill", "at": phase.at, "where": phase.where, "step": phase.step}
    fault |= {"delay_s": phase.delay_s, "stamp": str(stamp), "disk": "", "left": 0}
    codes = codes_of(start_agents(num_agents, place, fault), place)
    case = f"kill rank 1, {moment}, {num_agents} agent{'s' * (num_agents > 1)}"
    return row_of(case, place, reference, num_agents, happened=stamp.exists(), codes=codes)


def row_of(case: str, place: Path, reference: Path, num_agents: int, apart: float = 0.0, **known: Any) -> Row:
    """What came of a job, whose losses may be ``apart`` from those of the reference."""
    text = "".join((place / f"output.{agent}").read_text(errors="replace") for agent in range(num_agents))
    row = {
        "case": case,
        **known,
        "resumed_at": [int(line.rpartition(" ")[2]) for line in text.splitlines() if "evenload: resumed from" in line],
        **compared(steps_of(place / "log.jsonl"), steps_of(reference)),
    }
    row["faults"] = faults_of(row, len(row["codes"]), apart)
    row["output"] = text[-4000:] if row["faults"] else ""
    return row


def resized(folder: Path, reference: Path) -> Row:
    """Two ranks, three, two again, compared with the run of two ranks whose log ``reference`` is."""
    place = folder / "resized"
    env = {**environment(place / "plants", None), **FRESH_STORE}
    command = [*command_of(place, "--nnodes", "1:3", "--nproc-per-node", "1", "--rdzv-conf", SOON), *RESIZED]
    agents = [started(command, env, place / f"output.{agent}", place) for agent in range(2)]
    log, worlds = place / "log.jsonl", list[int]()

    def trained(world: int) -> bool:
        """Whether so many ranks come together and train two steps."""
        if there := within(LIMIT_S, lambda: world_of(agents[0]) == world):
            begun = lines_of(log)
            there = within(LIMIT_S, lambda: lines_of(log) >= begun + 2)
        worlds.extend([world] * there)
        return there

    if trained(2):
        agents.append(started(command, env, place / "output.2", place))
        trained(3)
        killed_with_ranks(agents.pop())
        trained(2)
    codes = codes_of(agents, place)
    return row_of(
        RESIZED_CASE, place, reference, 3, CONVERTED, happened=worlds == [2, 3, 2], worlds=worlds, codes=codes
    )


def ranks_of(agent: subprocess.Popen[bytes]) -> list[Path]:
    """Where the kernel tells about an agent's processes; torchrun gives each rank a session of its own."""
    with suppress(OSError):
        return [Path("/proc", pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]
    return []


def killed_with_ranks(agent: subprocess.Popen[bytes]) -> None:
    """As a machine that is gone."""
    for pid in (agent.pid, *(int(rank.name) for rank in ranks_of(agent))):
        os.kill(pid, signal.SIGKILL)
    agent.wait()


def within(limit_s: float, happened: Callable[[], bool]) -> bool:
    """Whether something happens in time."""
    patience = time.monotonic() + limit_s
    while not (there := happened()) and time.monotonic() < patience:
        time.sleep(0.1)
    return there


def lines_of(log: Path) -> int:
    """Steps that were logged, also those that were trained again."""
    return log.read_text().count("\n") if log.exists() else 0


def world_of(agent: subprocess.Popen[bytes]) -> int:
    """Ranks of the job in which an agent's are; 0: it has none now."""
    for rank in ranks_of(agent):
        with suppress(OSError):
            for name, _, value in (pair.partition("=") for pair in (rank / "environ").read_text().split("\0")):
                if name == "WORLD_SIZE":
                    return int(value)
    return 0


def faults_of(row: Row, num_agents: int, apart: float = 0.0) -> list[str]:
    """What is not as it should be."""
    checks = (
        (not row["happened"], "the fault never happened"),
        (row["codes"] != [0] * num_agents, f"exit codes {row['codes']}"),
        (row["lost"] > 0, "samples lost"),
        (row["repeated"] > 0, "samples repeated"),
        (row["loss_apart"] is None or row["loss_apart"] > apart, "losses differ"),
    )
    return [text for wrong, text in checks if wrong]


def undisturbed(folder: Path, *more: str) -> Path:
    """The log of a run of two ranks without a fault."""
    place = folder / f"undisturbed-{len(more)}"
    env = environment(place / "plants", None)
    command = [*command_of(place, "--nnodes", "1", "--nproc-per-node", "2"), *more]
    codes = codes_of([started(command, env, place / "output.0", place)], place)
    assert codes == [0], (place / "output.0").read_text()[-3000:]
    return place / "log.jsonl"
