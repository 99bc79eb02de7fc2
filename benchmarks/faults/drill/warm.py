"""Forks launchers, and they their ranks, from one process that has imported a trainer, so that jobs start at once.

warm.py TRAINER. A job is a line of JSON on stdin: the folder it runs in, the arguments of ``evenload``, the fault, the
file for what all of it prints, and how long it may take. The answer on stdout is the launcher's exit code (null: it had
to be ended), when it ended, and the processes that it left behind. Everything but the imports is as it always is: the
launcher's own code starts, watches and ends the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from plant import VARIABLE, plant_from_environment

MODULES = {
    "megatron": ("evenload.integrations.megatron.host",),
    "deepspeed": (
        "evenload.integrations.deepspeed.engine.host",
        "evenload.integrations.deepspeed.pipeline.host",
        "transformers.models.llama.modeling_llama",
        "torch._inductor.compile_fx",
    ),
}
_ORPHAN_S = 2.0
"""How long what a job left behind may take to end by itself."""


def warm(trainer: str) -> None:
    """Import what a rank imports, and start neither a thread nor a group."""
    from evenload.api import load_plugins
    from evenload.cli import main  # noqa: F401
    from evenload.training.verbs import train  # noqa: F401

    load_plugins()
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|deepspeed)\.")
    if trainer == "megatron":
        from evenload.patches import bridge_cpu

        bridge_cpu()
    for name in MODULES[trainer]:
        import_module(name)


class ForkedRank:
    """What the launcher takes for a `subprocess.Popen`."""

    def __init__(
        self, command: list[str], env: dict[str, str], stdin: int, stdout: int, pass_fds: tuple[int, ...]
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()  # which passes every descriptor on
        if not self.pid:
            os.environ.clear()
            os.environ.update(env)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(stdout, 1)
            run_and_exit(command[command.index("evenload") :])

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int | None:
        patience = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < patience:
            time.sleep(0.01)
        return self.returncode


def run_and_exit(argv: list[str]) -> None:
    """Do what ``evenload`` does with these words, then end this process."""
    code = 3
    sys.argv = argv
    try:
        plant_from_environment()
        from evenload.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def launcher_of(job: dict[str, Any]) -> int:
    """Process id of a new launcher, in a session of its own."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    os.chdir(job["place"])
    out = os.open(job["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if job["fault"]:
        os.environ[VARIABLE] = json.dumps(job["fault"])
    from evenload.training.launching import launch

    names = {"Popen": ForkedRank, "DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    launch.subprocess = SimpleNamespace(**names)  # type: ignore[assignment]
    run_and_exit(["evenload", *job["arguments"]])
    raise AssertionError("unreachable")


def left_behind(session: int, place: str) -> list[int]:
    """Processes of a session, or that work in a folder, zombies left out."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, *fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if state != "Z" and (int(fields[2]) == session or os.readlink(folder / "cwd").startswith(place)):
                    pids.append(int(folder.name))
            except OSError:
                continue
    return pids


def finish(session: int, code: int | None, ended_s: float, place: str) -> dict[str, Any]:
    """The answer about a job whose launcher is over; ends what it left."""
    patience = time.monotonic() + _ORPHAN_S
    while (orphans := left_behind(session, place)) and code is not None and time.monotonic() < patience:
        time.sleep(0.1)
    commands = []
    for pid in orphans:
        try:
            commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    return {"code": code, "ended_s": ended_s, "orphans": commands}


def run(job: dict[str, Any]) -> dict[str, Any]:
    pid = launcher_of(job)
    patience = time.monotonic() + job["limit_s"]
    while time.monotonic() < patience:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return finish(pid, os.waitstatus_to_exitcode(status), time.time(), job["place"])
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return finish(pid, None, time.time(), job["place"])


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warm(sys.argv[1])
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()
