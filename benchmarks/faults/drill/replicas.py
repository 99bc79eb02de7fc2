"""A rank of a replica is lost (`evenload train --elastic`); the others go on, it comes back, and nothing is lost.

It is killed or stopped.

Three ranks in two replicas, of two and of one, train a tiny model in float64. The fault happens in every phase of a
step, in each replica, the first one too. Rows of the log are compared with those of a run that nothing disturbed; what
counts is how long it takes from the fault to the next row.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from cases import BY_NAME
from restarts import start_agents
from runs import Row, compared, ended, environment, killed, started, steps_of

STEPS = 60
MODEL = {"family": "llama", "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
RECIPE: dict[str, Any] = {
    "trainer": "megatron",
    "model": MODEL,
    "parallel": {"replicas": [{"dp": 2}, {"dp": 1}]},
    "log": {"jsonl": "log.jsonl"},
    "safety": {"gone_s": 4, "stuck_s": 40},
}
KINDS: dict[str, dict[str, Any]] = {
    "train": {
        "data": {"source": "python-docstrings/email", "max_length": 256},
        "train": {"steps": STEPS, "global_batch_size": 8, "dtype": "fp64", "lr": 1e-3},
    },
    "tenants": {
        "train": {"dtype": "fp64"},
        "model": {**MODEL, "vocab_size": 256},
        "plugins": {
            "packing": {"enabled": True, "max_tokens": 2048},
            "lora": {"enabled": True, "tenants": "tenants", "out": "out"},
        },
    },
}
TENANTS = {
    "acme": {
        "data": {"source": "python-docstrings/email", "max_length": 256},
        "adapter": {"r": 4},
        "train": {"steps": 40, "batch_size": 5, "lr": 2e-3},
        "evaluate": {"source": "python-docstrings-held-out/email", "every": 5},
    },
    "solo": {
        "data": {"source": "python-docstrings/asyncio", "max_length": 192},
        "adapter": {"r": 8, "target_modules": ["q_proj", "down_proj"]},
        "train": {"steps": 50, "batch_size": 2, "seed": 7, "lr": 1e-3},
    },
    "short": {
        "data": {"source": "python-docstrings/asyncio", "max_length": 192},
        "train": {"steps": 6, "batch_size": 2, "seed": 9, "lr": 1e-3},
    },
}
PHASES = {
    "train": ("waiting for the plan", "forward and backward", "gradient sum", "update", "comparing times"),
    "tenants": ("forward and backward", "gradient sum", "update", "comparing times", "agreeing on tenants"),
}
FAULTY_STEP = 5
"""The last one of a tenant."""
SEEN_S = 2.0
"""From when a fault is known to the next step; one that is stopped is known after safety.gone_s."""


class Fault(NamedTuple):
    kind: str
    how: str
    replica: int
    rank: int
    where: str

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.how} rank {self.rank} of replica {self.replica}, {self.where}"


def faults() -> Iterator[Fault]:
    for kind, phases in PHASES.items():
        for where in phases:
            for how in ("kill", "stop"):
                for replica, rank in ((0, 0), (0, 1), (1, 0)):
                    yield Fault(kind, how, replica, rank, where)


def start(kind: str, place: Path, fault: Row | None, *words: str) -> subprocess.Popen[bytes]:
    place.mkdir(parents=True)
    (place / "r.yaml").write_text(yaml.safe_dump(RECIPE | KINDS[kind]))
    for name, tenant in TENANTS.items() if kind == "tenants" else ():
        (place / "tenants").mkdir(exist_ok=True)
        (place / "tenants" / f"{name}.yaml").write_text(yaml.safe_dump(tenant))
    command = [sys.executable, "-m", "evenload", "train", "r.yaml", *words]
    return started(command, environment(place / "plants", fault), place / "output", place)


def undisturbed(kind: str, folder: Path) -> Path:
    """The folder of a run on the same replicas, none of which is lost."""
    place = folder / f"undisturbed_{kind}"
    done = ended(start(kind, place, None), place)
    assert done["code"] == 0, (place / "output").read_text()[-3000:]
    return place


def next_row_s(log: Path, stamp: Path, limit_s: float = 120.0) -> float | None:
    """Seconds from the fault to the next row of the log."""
    until_s = time.monotonic() + limit_s
    while not stamp.exists() or not stamp.read_text():
        if time.monotonic() > until_s:
            return None
        time.sleep(0.01)
    fault_s, _ = json.loads(stamp.read_text())
    before = log.read_bytes().count(b"\n") if log.exists() else 0
    while log.read_bytes().count(b"\n") <= before:
        if time.monotonic() > until_s:
            return None
        time.sleep(0.01)
    return round(time.time() - fault_s, 2)


def run(fault: Fault, folder: Path, reference: Path) -> Row:
    """One fault, beside the undisturbed run."""
    place = folder / fault.name.replace(" ", "_").replace(":", "")
    stamp, log = place / "stamp", place / "log.jsonl"
    planted = {"rank": fault.rank, "replica": str(fault.replica), "how": fault.how, "at": "mark", "where": fault.where}
    planted |= {"step": FAULTY_STEP, "delay_s": 0, "stamp": str(stamp), "disk": "", "left": 0}
    job = start(fault.kind, place, planted, "--elastic")
    seconds = next_row_s(log, stamp)
    done = ended(job, place)
    text = (place / "output").read_text(errors="replace")
    rows = [row for row in map(json.loads, log.read_text().splitlines()) if "step_s" in row]
    here = [len(row.get("replicas", ())) for row in rows]
    row = {
        "case": fault.name,
        "happened": stamp.exists(),
        "seconds": seconds,
        "code": done["code"],
        "orphans": done["orphans"],
        "steps_alone": sum(one < 2 for one in here),
        "came_back": here[-1:] == [2],
        "said": [line for line in text.splitlines() if line.startswith("evenload: replica ") and " is lost " in line],
        **(compared(steps_of(log), steps_of(reference / "log.jsonl")) if fault.kind == "train" else {}),
        **(tenants_compared(place, reference) if fault.kind == "tenants" else {}),
    }
    row["faults"] = faults_of(fault, row, [one["step"] for one in rows])
    row["output"] = text[-4000:] if row["faults"] else ""
    return row


def tenants_compared(place: Path, reference: Path) -> Row:
    """As `compared`, over the steps and evaluations of all tenants."""
    lost, repeated, apart = 0, 0, 0.0
    for name in TENANTS:
        own, wanted = _rows_of(place, name), _rows_of(reference, name)
        lost += sum(1 for key, row in wanted.items() if key not in own or own[key][0][1] != row[0][1])
        repeated += sum(len(same) - 1 for same in own.values())
        apart = max([apart, *(abs(own[key][0][0] - row[0][0]) for key, row in wanted.items() if key in own)])
    return {"lost": lost, "repeated": repeated, "loss_apart": apart}


def _rows_of(place: Path, name: str) -> dict[tuple[bool, int], list[tuple[float, Any]]]:
    rows: dict[tuple[bool, int], list[tuple[float, Any]]] = {}
    path = place / "out" / name / "metrics.jsonl"
    for row in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        evaluation = row.get("evaluation")
        value = (evaluation or row)["loss"], row.get("samples")
        rows.setdefault((evaluation is not None, row["step"]), []).append(value)
    return rows


def faults_of(fault: Fault, row: Row, steps: list[int]) -> list[str]:
    """What is not as it should be."""
    known_s = RECIPE["safety"]["gone_s"] if fault.how == "stop" else 0
    checks = (
        (not row["happened"], "the fault never happened"),
        (row["code"] != 0, f"exit code {row['code']}"),
        (row["lost"] > 0, "lost"),
        (row["repeated"] > 0, "repeated"),
        (row["loss_apart"] > 1e-9, "losses differ"),
        (steps != list(range(len(steps))), "rows of the log are missing or there twice"),
        (row["seconds"] is None or row["seconds"] > known_s + SEEN_S, f"the next row came after {row['seconds']} s"),
        (len(row["said"]) != 1, f"{len(row['said'])} messages"),
        (bool(row["orphans"]), "processes were left behind"),
    )
    return [text for wrong, text in checks if wrong]


def restart_s(folder: Path) -> float | None:
    """Seconds from a kill to the next row where torchrun restarts a job, which goes on from its last checkpoint."""
    place = folder / "restart"
    phase, stamp = BY_NAME["forward"], place / "stamp"
    fault = {"rank": 1, "how": "kill", "at": phase.at, "where": phase.where, "step": phase.step, "delay_s": 0}
    agents = start_agents(1, place, fault | {"stamp": str(stamp), "disk": "", "left": 0})
    seconds = next_row_s(place / "log.jsonl", stamp)
    for agent in agents:
        agent.wait()
        killed(agent.pid, place)
    return seconds
