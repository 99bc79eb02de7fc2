"""Programs that data bring along, chat templates and patterns of names, run in a process that can be ended.

A template loops as its author likes, and a pattern may take time exponential in a name: nothing inside this process
could stop them. So another one computes for it, without torch and without a rank's sockets. The kernel ends it when
its CPU seconds are spent (SIGPROF, which nothing there handles) and refuses it more memory, so that every wait
is bounded; CPU seconds do not grow with the load of the machine. It starts when it is first needed, in 1.5 s where it
imports `transformers`, and ends with whoever started it.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import shorten

_MEMORY_BYTES = 1 << 29
_ANSWER_BYTES = 1 << 26


class SandboxError(Exception):
    """What was asked for failed, or took more time or memory than it may."""


@dataclass
class Budget:
    """CPU seconds for all that one author's programs do: some to begin with, and more with what they work on."""

    left_s: float = 1.0
    per_call_s: float = 0.0
    per_byte_s: float = 0.0


def bounded(budget: Budget, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """What a function of an importable module gives, as JSON has it. Raises SandboxError."""
    try:
        work = pickle.dumps((function, arguments, named))
    except Exception as error:  # of values nested as deep as JSON allows
        raise SandboxError(f"{type(error).__name__}: {error}") from error
    budget.left_s += budget.per_call_s + budget.per_byte_s * len(work)
    answer = _ask(pickle.dumps((budget.left_s, work))) if budget.left_s > 0 else -signal.SIGPROF
    if answer == -signal.SIGPROF:
        budget.left_s = -1.0
        raise SandboxError("it takes too long: its CPU seconds are used up")
    if isinstance(answer, int):
        raise SandboxError(f"its process ended with {answer}")
    budget.left_s -= answer["seconds"]
    if answer["error"] is not None:
        raise SandboxError(answer["error"])
    return answer["value"]


def _ask(question: bytes) -> dict[str, Any] | int:
    """The answer of the process, or the exit code with which it ended instead."""
    process = _process(os.getpid())
    assert process.stdin is not None
    assert process.stdout is not None
    line = b""
    try:
        with suppress(OSError):
            process.stdin.write(question)
            process.stdin.flush()
            line = process.stdout.readline()
    finally:
        if not line:  # also where this process was interrupted: nobody must take the answer for the next one's
            _process.cache_clear()
            process.kill()
            process.wait()
    return process.returncode if not line else dict(json.loads(line))


@cache
def _process(pid: int) -> subprocess.Popen[bytes]:
    """What computes for the process of this number: a fork has its own."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C is for whoever asked
    )


def _main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # seconds of imports that nothing here needs
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with suppress(EOFError):
        while True:
            left_s, work = pickle.load(sys.stdin.buffer)
            answers.write(_answer(left_s, work) + b"\n")
            answers.flush()


def _answer(left_s: float, work: bytes) -> bytes:
    value, error, begin_s = b"null", None, time.process_time()
    try:
        function, arguments, named = pickle.loads(work)  # which imports what it needs
        _limit_memory()
        begin_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, left_s)
        value = json.dumps(function(*arguments, **named)).encode()
        if len(value) > _ANSWER_BYTES:
            value, error = b"null", f"it gives more than {_ANSWER_BYTES} bytes"
    except Exception as caught:
        error = shorten(f"{type(caught).__name__}: {caught}")
    signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - begin_s
    return b'{"value": %s, "error": %s, "seconds": %f}' % (value, json.dumps(error).encode(), seconds)


@cache
def _limit_memory() -> None:
    """From here on, so much more than what imports have taken."""
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    _main()
