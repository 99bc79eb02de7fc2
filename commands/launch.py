"""Start the ranks of a job on this machine and wait for them, as torchrun would, with our own endings.

Each rank is the same command again with torchrun's variables in its environment, so a rank does not know who started
it. Everything that ranks print goes to stderr; rank 0 hands its result over in a file.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..core.errors import RankError

RESULT = "EVENLOAD_RESULT"
"""Names the file for rank 0's result; unset under torchrun, where rank 0 prints it."""
_GRACE_S = 30.0
"""After one rank has failed, the others' watchdogs have this long to end them with the message."""


def is_rank() -> bool:
    """Whether this process is one of a job's ranks, started by `launch` or torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(arguments: list[str], num_ranks: int) -> dict[str, Any]:
    """Run ``python -m evenload ARGUMENTS`` on ``num_ranks`` local ranks and return rank 0's result.

    Raises:
        SystemExit: with the ranks' exit code, where they have said themselves what went wrong.
        RankError: if they ended without a result and without a word.
    """
    with tempfile.TemporaryDirectory(prefix="evenload-") as folder:
        result = Path(folder) / "result.json"
        ranks = [
            _start(arguments, rank, num_ranks, port, result) for port in [_free_port()] for rank in range(num_ranks)
        ]
        try:
            code = _wait(ranks)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
        if code:
            raise SystemExit(code)
        if not result.exists():
            raise RankError("the ranks ended without a result", f"exit codes {[r.returncode for r in ranks]}")
        data: dict[str, Any] = json.loads(result.read_text())
        return data


def _start(arguments: list[str], rank: int, num_ranks: int, port: int, result: Path) -> subprocess.Popen[bytes]:
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    environment = {
        "OMP_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        RESULT: str(result),
    }
    command = [sys.executable, "-m", "evenload", *arguments]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """0 when all ranks ended well; else the exit code of the first that did not, after the others have ended."""
    failed: subprocess.Popen[bytes] | None = None
    deadline = float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
        bad = [rank for rank in ranks if rank.poll()]
        if bad and failed is None:
            failed, deadline = bad[0], time.monotonic() + _GRACE_S
    codes = [rank.poll() for rank in ranks]
    if all(code == 0 for code in codes):
        return 0
    if all(code is not None and code < 0 for code in codes):
        names = ", ".join(f"rank {i} by {signal.Signals(-c).name}" for i, c in enumerate(codes) if c)
        raise RankError("every rank was killed", names, "look for the out-of-memory killer in the kernel log")
    said = [code for code in codes if code is not None and code > 0]
    return max(said, default=1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
