"""Runs a command with all that it starts for at most so long, and keeps what it printed."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TAIL = 6000
"""Characters kept of a command's text."""


def run_limited(arguments: Sequence[str], limit_s: float, folder: Path) -> dict[str, Any]:
    """Run ``python3 ARGUMENTS`` in a folder: its ``exit_code`` (None: out of time), ``timed_out`` and ``wall_s``.

    With them ``result``, the JSON object that it printed, or ``printed``, the end of its text; ``stderr`` on failure.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    row: dict[str, Any] = {
        "command": shlex.join(["python3", *arguments]),
        "exit_code": code,
        "timed_out": code is None,
        "wall_s": round(time.monotonic() - began, 1),
    }
    try:
        row["result"] = json.loads(texts[0])
    except ValueError:
        row["printed"] = texts[0][-TAIL:]
    if code != 0:
        row["stderr"] = texts[1][-TAIL:]
    return row


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the session that the command was started in."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
