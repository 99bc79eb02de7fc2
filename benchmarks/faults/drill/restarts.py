"""A rank is killed under ``torchrun --max-restarts 2``, by one agent or by two, and the job is to go on by itself.

The moments are those of `MOMENTS`. The fault happens once, in whichever attempt comes first there.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from cases import BY_NAME, SMALL
from runs import PACKAGE, code_of, compared, environment, killed, started, steps_of

MOMENTS = ("start", "meeting", "build", "plan", "forward", "update", "compare", "save", "save, later", "end")


def arguments_of(place: Path) -> list[str]:
    """A small run of two ranks with a checkpoint every other step."""
    kept = (f"checkpoint.dir={place}/kept", f"log.jsonl={place}/log.jsonl", "plugins.packing.max_tokens=1024")
    return ["-m", "evenload", "train", str(PACKAGE / "recipes" / "quickstart.yaml"), *SMALL, *kept]


def start_agents(num_agents: int, place: Path, fault: dict[str, Any] | None) -> list[subprocess.Popen[bytes]]:
    """The agents of one job of two ranks."""
    env = environment(place / "plants", fault)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", place.name]
    words = ["--nnodes", str(num_agents), "--nproc-per-node", str(2 // num_agents), "--max-restarts", "2", *meeting]
    command = [sys.executable, "-m", "torch.distributed.run", *words, *arguments_of(place)]
    return [started(command, env, place / f"output.{agent}", place) for agent in range(num_agents)]


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
    wanted, steps = steps_of(reference), steps_of(place / "log.jsonl")
    text = "".join((place / f"output.{agent}").read_text(errors="replace") for agent in range(num_agents))
    row = {
        "case": f"kill rank 1, {moment}, {num_agents} agent{'s' * (num_agents > 1)}",
        "happened": stamp.exists(),
        "codes": codes,
        "resumed_at": [int(line.rpartition(" ")[2]) for line in text.splitlines() if "evenload: resumed from" in line],
        **compared(steps, wanted),
    }
    row["faults"] = faults_of(row, num_agents)
    row["output"] = text[-4000:] if row["faults"] else ""
    return row


def faults_of(row: dict[str, Any], num_agents: int) -> list[str]:
    """What is not as it should be."""
    checks = (
        (not row["happened"], "the fault never happened"),
        (row["codes"] != [0] * num_agents, f"exit codes {row['codes']}"),
        (row["lost"] > 0, "samples lost"),
        (row["repeated"] > 0, "samples repeated"),
        (row["loss_apart"] != 0.0, "losses differ"),
    )
    return [text for wrong, text in checks if wrong]


def undisturbed(folder: Path) -> Path:
    """The log of a run without a fault."""
    place = folder / "undisturbed"
    codes = codes_of(start_agents(1, place, None), place)
    assert codes == [0], (place / "output.0").read_text()[-3000:]
    return place / "log.jsonl"
