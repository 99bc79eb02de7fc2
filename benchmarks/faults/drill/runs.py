"""Runs cases of the drill and says what came of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import Any

import evenload
from cases import FAULTY_STEP, Case, Setting
from evenload.training.checkpoint.checkpoints import last_good
from plant import VARIABLE

LIMIT_S = 150.0
ORPHAN_S = 2.0
"""How long what a job left behind may take to end by itself."""
OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PLANT = """
import json, os, sys
fault = json.loads(os.environ.get("EVENLOAD_FAULT", "{}"))
if fault and not os.path.exists(fault["stamp"]):
    try:
        import plant
        plant.plant_from_environment()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
"""
HERE = Path(__file__).parent
PACKAGE = Path(evenload.__file__).parent
DISK_BYTES = 24_000_000
CONVERTED = 1e-5
"""How far losses may be apart where a checkpoint goes on with other ranks: sums run in another order."""

MESSAGE = re.compile(
    r"^evenload: (?:rank \d+ of \d+.* (?:is gone|is stuck|failed in|did not come|was held up|ended early|is stopped"
    r"|does not end)|in '|every rank|\d+ of \d+ ranks|the torchrun agent|rank \d+ (?:waited|cannot)|the ranks ended)"
)
Row = dict[str, Any]
Steps = dict[int, tuple[list[int], float]]
"""Samples and loss of every step."""


def environment(plants: Path, fault: Row | None) -> dict[str, str]:
    """Of a job in whose victim the fault happens once; it comes with a sitecustomize in the folder ``plants``."""
    plants.mkdir(parents=True, exist_ok=True)
    (plants / "sitecustomize.py").write_text(PLANT)
    paths = os.pathsep.join([str(plants), str(HERE), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    others = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    return {**others, **own, **({VARIABLE: json.dumps(fault)} if fault else {})}


def started(command: list[str], env: dict[str, str], output: Path, place: Path) -> subprocess.Popen[bytes]:
    """A launcher in a session of its own; all that its processes print comes to ``output``."""
    with output.open("ab") as out:
        return subprocess.Popen(command, cwd=place, env=env, stdout=out, stderr=out, start_new_session=True)


def code_of(job: subprocess.Popen[bytes]) -> int | None:
    """The launcher's exit code; None: it had to be killed."""
    try:
        return job.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
        return None


def ended(job: subprocess.Popen[bytes], place: Path) -> Row:
    """How and when the launcher ended, and the processes that it left behind, which are killed."""
    code, ended_s, patience = code_of(job), time.time(), time.monotonic() + ORPHAN_S
    while left_behind(job.pid, place) and code is not None and time.monotonic() < patience:
        time.sleep(0.1)
    return {"code": code, "ended_s": ended_s, "orphans": killed(job.pid, place)}


def killed(session: int, place: Path) -> list[str]:
    """The command lines of what was left of a session and had to be killed."""
    commands = []
    for pid in left_behind(session, place):
        try:
            commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    return commands


def left_behind(session: int, place: Path) -> list[int]:
    """Processes of a session, or that work in a folder, zombies left out."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, *fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if state != "Z" and (int(fields[2]) == session or os.readlink(folder / "cwd").startswith(str(place))):
                    pids.append(int(folder.name))
            except OSError:
                continue
    return pids


def steps_of(log: Path) -> Steps:
    """Of the last time that each step was trained."""
    lines = log.read_text().splitlines() if log.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # a full disk cuts the last one off
    return {row["step"]: (row["samples"], row["loss"]) for row in rows}


def steps_by_loss(text: str, wanted: Steps) -> Steps:
    """Of a run whose log was given up: a step whose loss is the very one that was wanted had the samples wanted."""
    results = [json.loads(line) for line in text.splitlines() if line.startswith('{"recipe"')]
    losses = {row["step"]: row["loss"] for result in results for row in result["steps"]}
    return {step: (wanted[step][0] if loss == wanted[step][1] else [], loss) for step, loss in losses.items()}


def compared(steps: Steps, wanted: Steps, first: int = 0) -> Row:
    """Samples that are lost or there twice from a step on, and the largest difference of a loss."""
    lost = repeated = 0
    for step, (samples, _) in wanted.items():
        if step >= first:
            ours, theirs = Counter(steps.get(step, ([], 0.0))[0]), Counter(samples)
            lost, repeated = lost + (theirs - ours).total(), repeated + (ours - theirs).total()
    apart = [abs(loss - wanted[step][1]) for step, (_, loss) in steps.items() if step in wanted]
    return {"lost": lost, "repeated": repeated, "loss_apart": max(apart, default=None)}


class Drill:
    """One folder, and for each setting a run that nothing disturbs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._undisturbed: dict[tuple[str, int], Path] = {}
        self._disk = folder / "disk"
        self._disk.mkdir()
        size = f"size={DISK_BYTES}"
        mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self._disk)]
        self.has_disk = subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        if self.has_disk:
            subprocess.run(["umount", str(self._disk)], check=True)

    def collectives(self, setting: Setting) -> list[str]:
        """What ranks call in a step, in the order in which they first do."""
        names: list[str] = json.loads((self._reference(setting, 2) / "stamp").read_text())
        return [name for name in names if "." not in name]

    def run(self, case: Case) -> Row:
        place = self._disk if case.how == "disk" and case.ends else self._folder / "case"
        self._prepare(case, place)
        output, stamp = self._folder / "output", self._folder / "stamp"
        for path in (output, stamp):
            path.unlink(missing_ok=True)
        fault, arguments = case.fault(str(stamp), str(self._disk)), self._arguments(case.setting, 2)
        if case.phase.name == "log":
            log = (f"log.jsonl={self._disk}/log.jsonl", f"log.tensorboard={self._disk}/board")
            arguments = (*arguments, *log, "--json")
        end = self._ran(place, arguments, fault, output)
        text = output.read_text(errors="replace")
        at_s, where = json.loads(stamp.read_text()) if stamp.exists() else (None, "")
        good = last_good(place / "kept")
        (self._disk / "filler").unlink(missing_ok=True)
        row = {
            "case": case.name,
            "setting": case.setting.name,
            "phase": case.phase.name,
            "fault": f"{case.how} rank {case.victim}",
            "mark": where,
            "seconds": at_s and round(end["ended_s"] - at_s, 1),
            "code": end["code"],
            "messages": messages_of(text),
            "tracebacks": text.count("Traceback (most recent call last)"),
            "lines": len(text.splitlines()),
            "orphans": end["orphans"],
            "last_good": good.name if good else None,
            **self._go_on(case, place, text),
        }
        row["faults"] = list(faults_of(case, row))
        row["output"] = text[-4000:] if row["faults"] else ""
        return row

    def _go_on(self, case: Case, place: Path, text: str) -> Row:
        """Resume without a fault, and compare all steps with the run that nothing disturbed."""
        output = self._folder / "resumed"
        output.unlink(missing_ok=True)
        answer = self._ran(place, self._arguments(case.setting, 2), None, output)
        wanted = steps_of(self._reference(case.setting, 2) / "log.jsonl")
        steps = steps_of(place / "log.jsonl") if case.phase.name != "log" else steps_by_loss(text, wanted)
        begun = FAULTY_STEP - 1 if case.phase.begins != "fresh" else 0
        resumed_text = output.read_text(errors="replace")
        return {
            "resumed": answer["code"],
            **compared(steps, wanted, begun),
            "resume_output": resumed_text[-2000:] if answer["code"] else "",
        }

    def _prepare(self, case: Case, place: Path) -> None:
        """An empty folder, or one with a checkpoint of the first steps."""
        for path in [*place.iterdir()] if place == self._disk else [place]:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        place.mkdir(exist_ok=True)
        if case.phase.begins == "fresh":
            return
        source = self._reference(case.setting, 1 if case.phase.begins == "convert" else 2) / "kept"
        first = f"step{FAULTY_STEP - 1:08d}"
        shutil.copytree(source / first, place / "kept" / first)
        (place / "kept" / "latest").write_text(first)

    def _reference(self, setting: Setting, num_ranks: int) -> Path:
        """The folder of a run of all steps; its collectives are listed in ``stamp``."""
        key = setting.name, num_ranks
        if key not in self._undisturbed:
            place = self._folder / f"{setting.name} {num_ranks}"
            place.mkdir()
            trace = {"rank": 0, "how": "trace", "at": "none", "where": "", "step": 2, "stamp": str(place / "stamp")}
            output = place / "output"
            answer = self._ran(place, self._arguments(setting, num_ranks), trace, output)
            assert answer["code"] == 0, output.read_text()[-3000:]
            self._undisturbed[key] = place
        return self._undisturbed[key]

    def _arguments(self, setting: Setting, num_ranks: int) -> tuple[str, ...]:
        more = ("checkpoint.dir=kept", "log.jsonl=log.jsonl", *(["parallel.dp=1"] if num_ranks == 1 else []))
        return ("train", str(PACKAGE / "recipes" / setting.recipe), *setting.arguments, *more)

    def _ran(self, place: Path, arguments: tuple[str, ...], fault: Row | None, output: Path) -> Row:
        command = [sys.executable, "-m", "evenload", *arguments]
        return ended(started(command, environment(self._folder / "plants", fault), output, place), place)


def messages_of(text: str) -> list[str]:
    """Every failure that was told, with what belongs to it."""
    lines = text.splitlines()
    messages = []
    for number, line in enumerate(lines):
        if MESSAGE.match(line):
            rest = takewhile(lambda more: more.startswith("  "), lines[number + 1 :])
            messages.append("\n".join([line, *rest]))
    return messages


def faults_of(case: Case, row: Row) -> list[str]:
    """What is not as it should be; empty where all is."""
    said = row["messages"][0] if row["messages"] else ""
    checks = [(row["seconds"] is None, "the fault never happened"), (bool(row["orphans"]), "orphans")]
    checks += [(row["code"] is None, f"not ended in {LIMIT_S:.0f} s"), (row["resumed"] != 0, "resume failed")]
    checks += [(row["lost"] > 0, "samples lost"), (row["repeated"] > 0, "samples repeated")]
    rounding = CONVERTED if case.phase.begins == "convert" else 0.0
    checks += [((row["loss_apart"] or 0.0) > rounding, "losses differ")]
    if case.how == "terminate":
        kept = int((row["last_good"] or "0").removeprefix("step"))
        begun = 0 if case.phase.begins == "fresh" else FAULTY_STEP - 1
        checks += [(row["code"] != (75 if case.ended_after else 143), f"exit code {row['code']}")]
        checks += [(bool(row["messages"]), "a message"), (kept not in (case.ended_after or (begun,)), f"kept {kept}")]
        return [text for wrong, text in checks if wrong]
    if not case.ends:
        checks += [(row["code"] != 0, f"exit code {row['code']}"), (bool(row["messages"]), "a message")]
        return [text for wrong, text in checks if wrong]
    checks += [(row["code"] not in (1, None), f"exit code {row['code']}")]
    if case.how == "raise" and case.phase.at == "start":
        return [text for wrong, text in checks if wrong]  # nothing of ours runs yet: Python tells it
    checks += [(len(row["messages"]) != 1, f"{len(row['messages'])} messages")]
    if case.how in ("kill", "stop", "raise", "hang"):
        place = f"'{row['mark']}'" if case.phase.at != "start" else "before it met the other ranks"
        checks += [(f"rank {case.victim} of 2" not in said, "another rank is named")]
        checks += [(place not in said, "another phase is named")]
    if case.how == "nan":
        checks += [("not finite" not in said, "the cause is not named")]
    if case.how == "disk":
        checks += [("free space" not in said, "the cause is not named")]
    return [text for wrong, text in checks if wrong]
