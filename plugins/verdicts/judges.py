"""Judges: a function in a process of its own, or any command; both answer a line of JSON for each that they read.

    read    {"prompt": ..., "first": "...", "second": "..."}
    answer  "first", "second", "tie", or a number from 0 to 1: how far the first is better, 0.5 a tie

A function is ``judge(prompt, first, second)`` and gives such an answer. Whatever it prints goes to stderr.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from threading import Thread
from typing import Any, NamedTuple

from ...core.errors import EvenloadError, refuse_first, shorten, shown

VERDICTS = {"first": 1.0, "second": 0.0, "tie": 0.5}
ANSWERING = "evenload.plugins.verdicts.answering"
_LINE_BYTES = 1 << 16
"""Of an answer."""
_DO = 'answer "first", "second", "tie", or a number from 0 to 1'


class Question(NamedTuple):
    """Two texts for a judge, in the order in which it reads them."""

    prompt: Any
    first: str
    second: str


Judge = Callable[[Sequence[Question]], list[float]]
"""How far it prefers the first text of each question, from 0 to 1."""


def preference(answer: Any, place: str) -> float:
    """An answer as a number, 1 for the first text. Raises EvenloadError, which names the place, for another one."""
    number = VERDICTS.get(answer) if isinstance(answer, str) else answer
    fine = isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number <= 1  # which NaN is not
    refuse_first((not fine, f"{place} has no verdict", shown(answer), _DO))
    return float(number)  # type: ignore[arg-type]


def by_function(word: str, limit_s: float) -> Judge:
    """The judge ``module:name``, which must have answered all questions in ``limit_s`` seconds."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return _by_words([sys.executable, "-P", "-m", ANSWERING, word], word, limit_s, {"PYTHONPATH": paths})


def by_command(command: str, limit_s: float) -> Judge:
    """The judge that a command is; no shell reads it. Raises EvenloadError where it has no words."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    refuse_first((not words, "--judge-command is no command", shown(command), "give a program and its arguments"))
    return _by_words(words, words[0], limit_s, {})


def _by_words(words: list[str], name: str, limit_s: float, environment: dict[str, str]) -> Judge:
    ok = math.isfinite(limit_s) and limit_s > 0
    refuse_first((not ok, "--limit is no time", shown(limit_s), "give the seconds that the judge may take in all"))

    def judge(questions: Sequence[Question]) -> list[float]:
        asked = "".join(json.dumps(question._asdict()) + "\n" for question in questions).encode()
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **environment},
                start_new_session=True,  # so that what it starts ends with it
            )
        except (OSError, ValueError) as error:
            detail, do = shorten(f"{name}: {error}"), "name a program that is there and can be run"
            raise EvenloadError("the judge cannot be started", detail, do) from error
        lines, late = _exchanged(process, asked, len(questions), limit_s)
        code, counts = process.returncode, f"{len(lines)} of {len(questions)} answers"
        what, do = f"the judge {shorten(name)}", "mend it: it answers a line for each that it reads"
        more = "give it longer (--limit), or mend what it waits for"
        refuse_first(
            (late, f"{what} has not ended in {limit_s:g} s", counts, more),
            (len(lines) > len(questions), f"{what} gave more answers than it was asked", counts, do),
            (bool(code), f"{what} ended with exit code {code}", f"{counts}; above is what it said on stderr", do),
            (len(lines) < len(questions), f"{what} gave fewer answers than it was asked", counts, do),
        )
        return [preference(_parsed(line), f"answer {n} of {what}") for n, line in enumerate(lines, 1)]

    return judge


def _exchanged(process: subprocess.Popen[bytes], asked: bytes, most: int, limit_s: float) -> tuple[list[bytes], bool]:
    """The lines that a process answers, one more than ``most`` if it goes on, and whether it was late; then it ends."""
    lines, end_s = list[bytes](), time.monotonic() + limit_s
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, answers = process.stdin, iter(partial(process.stdout.readline, _LINE_BYTES), b"")

    def read() -> None:
        for line in islice(answers, most + 1):
            lines.append(line)

    def write() -> None:
        with suppress(OSError), stdin:  # of one that reads no more
            stdin.write(asked)

    reader, writer = (Thread(target=work, daemon=True) for work in (read, write))
    try:
        writer.start()
        reader.start()
        reader.join(limit_s)
        if len(lines) <= most and not reader.is_alive():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end_s - time.monotonic()))
        return list(lines), len(lines) <= most and process.poll() is None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line.decode("utf-8", "replace").strip()
