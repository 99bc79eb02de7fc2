"""Commands of evenload without an interpreter each: in this process, or by forks of one that has begun as it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from evenload import cli

Done = subprocess.CompletedProcess[str]
OF_A_JOB = ("RANK", "WORLD_SIZE")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu")
ACCELERATE += ("--num_machines", "1", "--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no")
"""What starts a script on two ranks; Accelerate needs a ``--main_process_port``, too."""
FORKING = """
import json, os, sys
exec(sys.argv[1])
from evenload.cli import main
import evenload.api, evenload.commands.verbs.forecast, evenload.commands.tables.plan
import evenload.training.forecast.forecast, evenload.training.pictures
for line in sys.stdin:
    place, words, *outputs = json.loads(line)
    if not (child := os.fork()):
        os.chdir(place)
        for stream, output in enumerate(outputs, 1):
            os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["evenload", *words]
        main()
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def command(place: Path, *words: object) -> Done:
    """``evenload WORDS`` in a folder, done by this process; the output of processes that it starts is its own."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        outputs = [Path(folder) / name for name in ("out", "err")]
        stack.enter_context(patch.dict(os.environ))
        for name in OF_A_JOB:
            os.environ.pop(name, None)
        stack.enter_context(chdir(place))
        stack.enter_context(patch.object(sys, "argv", ["evenload", *map(str, words)]))
        for number, (output, redirect) in enumerate(zip(outputs, (redirect_stdout, redirect_stderr), strict=True), 1):
            file = stack.enter_context(output.open("a", buffering=1))
            stack.enter_context(redirect(file))
            stack.callback(os.close, kept := os.dup(number))
            stack.callback(os.dup2, kept, number)
            os.dup2(file.fileno(), number)
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        return Done(list(map(str, words)), code, *(output.read_text() for output in outputs))


class Commands:
    """An interpreter that has run some code and imported the command line; each command is done by a fork of it."""

    def __init__(self, first: str = "", environment: Mapping[str, str] | None = None) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in OF_A_JOB} | (environment or {})
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", FORKING, first],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, place: Path, *words: str) -> Done:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with TemporaryDirectory() as folder:
            outputs = [Path(folder) / name for name in ("out", "err")]
            self._process.stdin.write(json.dumps([str(place), words, *map(str, outputs)]) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            return Done(list(words), code, *(path.read_text() for path in outputs))

    def close(self) -> None:
        self._process.communicate()
