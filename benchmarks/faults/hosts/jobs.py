"""A job of two ranks, one a host of `Wire`, as clusters start it: with srun's variables, or by torchrun's agents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from cases import SMALL
from runs import PACKAGE
from warm import left_behind
from wire import HOSTS, Wire

LIMIT_S = 400.0
OF_ONE_HOST = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
AHEAD_S = 3600.0
SITE = """
import os, time
ahead = float(os.environ.get("CLOCK_AHEAD_S", "0"))
if ahead:
    clock, clock_ns = time.time, time.time_ns
    time.time = lambda: clock() + ahead
    time.time_ns = lambda: clock_ns() + int(ahead * 1e9)
import slow
"""
SLOW = """
import os
delay_s = float(os.environ.get("SLOW_WRITES_S", "0"))
if delay_s:
    import builtins, io, time
    opened = io.open
    def opening(file, mode="r", *more, **options):
        if "w" in mode or "a" in mode:
            time.sleep(delay_s)
        return opened(file, mode, *more, **options)
    builtins.open = io.open = opening
"""
"""Every file that is opened to be written takes so long, as on a disk that many share."""


@dataclass
class Job:
    """What two hosts run in a folder that both see, each with its own cache, home and temporary files."""

    wire: Wire
    place: Path
    launcher: str = "srun"
    overrides: tuple[str, ...] = ()
    env: tuple[dict[str, str], dict[str, str]] = field(default_factory=lambda: ({}, {}))
    hosts: tuple[int, ...] = (0, 1)
    started: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)
    """When what the launcher started on a host ended."""
    seen_s: dict[int, float] = field(default_factory=dict)
    """When a rank of a host was last there."""

    def start(self, host: int) -> None:
        own = self.place / f"host{host}"
        for name in ("cache", "home", "tmp", "site"):
            (own / name).mkdir(parents=True, exist_ok=True)
        (own / "site" / "sitecustomize.py").write_text(SITE)
        (own / "site" / "slow.py").write_text(SLOW)
        with (own / "output").open("ab") as out:
            command = self.wire.inside(host, self._command())
            self.started[host] = subprocess.Popen(
                command, cwd=own, env=self._env(host, own), stdout=out, stderr=out, start_new_session=True
            )

    def _command(self) -> list[str]:
        kept = (f"checkpoint.dir={self.place}/kept", f"log.jsonl={self.place}/log.jsonl")
        job = ["train", str(PACKAGE / "recipes" / "quickstart.yaml"), *SMALL, "plugins.packing.max_tokens=1024", *kept]
        words = ["-m", "evenload", *job, *self.overrides]
        if self.launcher == "srun":
            return [sys.executable, *words]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HOSTS[self.hosts[0]]}:29400", "--rdzv-id", "1"]
        agents = ["--nnodes", str(len(self.hosts)), "--nproc-per-node", "1", *meeting]
        return [sys.executable, "-m", "torch.distributed.run", *agents, *words]

    def _env(self, host: int, own: Path) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if k not in OF_ONE_HOST}
        paths = os.pathsep.join([str(own / "site"), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
        folders = {"EVENLOAD_CACHE": str(own / "cache"), "HOME": str(own / "home"), "TMPDIR": str(own / "tmp")}
        step = self._step_of_slurm(host) if self.launcher == "srun" and len(self.hosts) > 1 else {}
        return {**clean, **folders, **step, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **self.env[host]}

    def _step_of_slurm(self, host: int) -> dict[str, str]:
        number = str(self.hosts.index(host))
        task = {"SLURM_PROCID": number, "SLURM_NODEID": number, "SLURM_LOCALID": "0"}
        step = {"SLURM_STEP_NUM_TASKS": str(len(self.hosts)), "SLURM_STEP_TASKS_PER_NODE": f"1(x{len(self.hosts)})"}
        return {**task, **step, "SLURM_STEP_NODELIST": "node-[0-1]", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}

    def kill(self, host: int) -> None:
        """All processes of a host at once, as a host without power."""
        for pid in self._processes(host):
            os.kill(pid, signal.SIGKILL)

    def _processes(self, host: int) -> list[int]:
        return left_behind(self.started[host].pid, str(self.place / f"host{host}"))

    def wait(self, limit_s: float = LIMIT_S) -> dict[int, int | None]:
        """Exit codes by host; None where it had to be ended."""
        patience = time.monotonic() + limit_s
        while time.monotonic() < patience and len(self.ended_s) < len(self.started):
            for host, agent in self.started.items():
                now_s, is_running = time.monotonic(), agent.poll() is None
                if len(self._processes(host)) > (self.launcher == "torchrun"):
                    self.seen_s[host] = now_s
                if not is_running:
                    self.ended_s.setdefault(host, now_s)
            time.sleep(0.1)
        codes = {host: agent.poll() for host, agent in self.started.items()}
        for host in self.started:
            self.kill(host)
            self.started[host].wait()
        return codes

    def output(self, host: int) -> str:
        path = self.place / f"host{host}" / "output"
        return path.read_text(errors="replace") if path.exists() else ""
