"""A rank is killed under ``torchrun --max-restarts 2``, by one agent or by two, and the job is to go on by itself.

The moments are those of `MOMENTS`. The fault is planted by a ``sitecustomize`` in every process, and happens once, in
whichever attempt comes first there.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cases import BY_NAME, SMALL
from plant import VARIABLE
from runs import HERE, PACKAGE, compared, steps_of
from warm import left_behind

MOMENTS = ("start", "meeting", "build", "plan", "forward", "update", "compare", "save", "save, later", "end")
LIMIT_S = 150.0
PLANT = """
import json, os
fault = json.loads(os.environ.get("EVENLOAD_FAULT", "{}"))
if fault and not os.path.exists(fault["stamp"]):
    import plant
    plant.plant_from_environment()
"""


def arguments_of(place: Path) -> list[str]:
    """A small run of two ranks with a checkpoint every other step."""
    kept = (f"checkpoint.dir={place}/kept", f"log.jsonl={place}/log.jsonl", "plugins.packing.max_tokens=1024")
    return ["-m", "evenload", "train", str(PACKAGE / "recipes" / "quickstart.yaml"), *SMALL, *kept]


def start_agents(num_agents: int, place: Path, fault: dict[str, Any] | None) -> list[subprocess.Popen[bytes]]:
    """The agents of one job of two ranks."""
    plants = place / "plants"
    plants.mkdir(parents=True)
    (plants / "sitecustomize.py").write_text(PLANT)
    paths = [str(plants), str(HERE), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    env = {**clean, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if fault:
        env[VARIABLE] = json.dumps(fault)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", place.name]
    words = ["--nnodes", str(num_agents), "--nproc-per-node", str(2 // num_agents), "--max-restarts", "2", *meeting]
    command = [sys.executable, "-m", "torch.distributed.run", *words, *arguments_of(place)]
    return [_start(command, env, place / f"output.{agent}") for agent in range(num_agents)]


def _start(command: list[str], env: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as out:
        return subprocess.Popen(command, cwd=output.parent, env=env, stdout=out, stderr=out, start_new_session=True)


def finish(agents: list[subprocess.Popen[bytes]], place: Path) -> list[int | None]:
    """Exit codes; None for an agent that had to be ended."""
    patience = time.monotonic() + LIMIT_S
    codes: list[int | None] = []
    for agent in agents:
        try:
            codes.append(agent.wait(max(0.0, patience - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for agent, code in zip(agents, codes, strict=True):
        for pid in left_behind(agent.pid, str(place)) if code is None else ():
            os.kill(pid, signal.SIGKILL)
        agent.wait()
    return codes


def run(moment: str, num_agents: int, folder: Path, reference: Path) -> dict[str, Any]:
    """One kill of rank 1, compared with the undisturbed run whose log ``reference`` is."""
    place = folder / f"{moment.replace(', ', '-')}-{num_agents}"
    phase, stamp = BY_NAME[moment], place / "stamp"
    fault = {"rank": 1, "how": "kill", "at": phase.at, "where": phase.where, "step": phase.step}
    fault |= {"delay_s": phase.delay_s, "stamp": str(stamp), "disk": "", "left": 0}
    codes = finish(start_agents(num_agents, place, fault), place)
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
    codes = finish(start_agents(1, place, None), place)
    assert codes == [0], (place / "output.0").read_text()[-3000:]
    return place / "log.jsonl"
