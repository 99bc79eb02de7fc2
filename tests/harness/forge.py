"""Forges: a process that has imported a trainer. Its forks are the ranks of commands, of scripts and of worlds."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .costs import add, reported_already

Done = subprocess.CompletedProcess[str]
PLANNING, PATIENT = ("train", "bench", "verify"), "planner.budget_ms=60000"
"""Verbs that plan ahead, and what makes them wait for each plan on a machine however busy: runs are compared bit by
bit."""


def free_port() -> int:
    """A port that nobody has, of those that the system gives nobody who does not ask for it: it stays free."""
    while True:
        port = random.SystemRandom().randrange(12000, 30000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


REFERENCES = "EVENLOAD_REFERENCES"
"""Variable that names the folder of references for ranks; without it none are kept (see references.py)."""


class Forge:
    """A fork of the process that has imported one trainer; forks the ranks of jobs and of worlds itself.

    Args:
        trainer: see forge_process.py.
        folder: for the outputs of this forge's ranks.
        shared: where the pytest processes of a run find the one process of this trainer; the first of them starts it.
    """

    def __init__(self, trainer: str, folder: Path, shared: Path | None = None) -> None:
        self._folder, self._number = folder, 0
        self._started: list[Started] = []
        self._process: subprocess.Popen[bytes] | None = None
        place = shared or folder
        self._log = place / f"{trainer}.log"
        with (place / f"{trainer}.door").open("a+") as known:
            fcntl.flock(known, fcntl.LOCK_EX)
            known.seek(0)
            self._connection = _connected(known.read())
            if self._connection is None:
                door = f"{tempfile.mkdtemp(prefix='forge-')}/door"  # short: the name of a socket has at most 107 bytes
                self._start(trainer, door)
                known.truncate(0)
                known.write(door)
        self._answers = self._connection.makefile("r")

    def _start(self, trainer: str, door: str) -> None:
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("forge_process.py")), trainer, door],
                env={**clean, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE,  # whose end tells it that no pytest process will come
                stdout=log,
                stderr=log,
            )
        while (connection := _connected(door)) is None:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            time.sleep(0.02)
        self._connection = connection

    def ask(self, request: str, content: Any) -> list[int]:
        """The answer of forge_process.py to a request."""
        self._connection.sendall((json.dumps({request: content}) + "\n").encode())
        answer = self._answers.readline()
        assert answer, self._log.read_text()[-3000:]
        numbers, costs = json.loads(answer)
        add(costs)
        return list(numbers)

    def run(
        self,
        place: Path,
        arguments: tuple[str, ...],
        ranks: int,
        planted: str = "",
        script: Path | None = None,
        limit_s: float = 250,
    ) -> Done:
        """Run ``evenload ARGUMENTS`` or a script as so many ranks; stdout is rank 0's, stderr what all of them said."""
        if script is None and arguments[0] in PLANNING and not any("planner." in word for word in arguments):
            arguments = (*arguments, PATIENT)
        outputs = self._outputs()
        (outputs / "planted.py").write_text(planted)
        port = free_port()
        job = {"place": str(place), "arguments": arguments, "ranks": ranks, "port": port, "outputs": str(outputs)}
        job |= {"planted": bool(planted), "script": str(script or ""), "limit_s": limit_s}
        codes = self.ask("job", job)
        code = next((c for c in sorted(codes, reverse=True) if c > 0), min(codes))
        said = "".join((outputs / f"err.{rank}").read_text() for rank in range(ranks))
        done = Done(list(arguments), code, (outputs / "out.0").read_text(), said)
        done.outputs = outputs
        return done

    def start(self, script: Path, *arguments: object, environment: dict[str, str]) -> Started:
        """Start a script as one rank with this environment alone."""
        outputs = self._outputs()
        content = {"script": str(script), "arguments": list(map(str, arguments)), "environment": environment}
        (pid,) = self.ask("start", {**content, "outputs": str(outputs)})
        self._started.append(Started(self, pid, outputs))
        return self._started[-1]

    def _outputs(self) -> Path:
        folder = self._folder / str(self._number)
        folder.mkdir()
        self._number += 1
        return folder

    def close(self) -> None:
        for started in self._started:
            started.end()
        self._answers.close()
        self._connection.close()
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            with reported_already(), suppress(subprocess.TimeoutExpired):  # while other pytest processes have forks
                self._process.wait(timeout=5)


def _connected(door: str) -> Any:
    """A connection to this socket, or None where nobody listens."""
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(door)
    except OSError:
        client.close()
        return None
    return client


class Started:
    """A script that a forge has started; as subprocess.Popen, with both outputs in one text."""

    def __init__(self, forge: Forge, pid: int, outputs: Path) -> None:
        self._forge, self.pid, self._outputs = forge, pid, outputs
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            (self.returncode,) = self._forge.ask("poll", self.pid) or (None,)
        return self.returncode

    def wait(self, timeout_s: float = 250) -> int:
        deadline = time.monotonic() + timeout_s
        while self.poll() is None:
            assert time.monotonic() < deadline, f"{self.pid} did not end in {timeout_s} s: {self.output}"
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    @property
    def output(self) -> str:
        return "".join((self._outputs / f"{name}.0").read_text() for name in ("out", "err"))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()
