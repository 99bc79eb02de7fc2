"""``evenload run RECIPE -- COMMAND``: the command as it stands, with the plugins on in all its Python processes.

A folder of evenload's own (`startup`) goes on PYTHONPATH, in front. Python looks there for ``sitecustomize`` when it
starts, whoever starts it: torchrun, the deepspeed launcher, a shell script, ``python -m``. The command line need not be
understood or rewritten for that, which would reach no further than the first process. The folder is part of the
installed package and not a temporary one, so that other nodes have it too. Python started without PYTHONPATH
(``-I``, ``-E``, ``-S``) is not reached; where no process was, a warning says so.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ..api import load_recipe
from ..core.errors import EvenloadError
from ._shared.hosts import require

STARTUP = Path(__file__).parent / "startup"
_FIRST_IMPORTS = {"megatron": "megatron.core", "deepspeed": "deepspeed"}
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def run(recipe: str | Path, command: Sequence[str]) -> int:
    """Run the command to its end; its exit code, or 128 + the signal that ended it.

    Raises EvenloadError if the recipe is wrong, its trainer is missing, or there is no such command.
    """
    trainer = load_recipe(recipe).trainer
    require(trainer)
    if not command or shutil.which(command[0]) is None:
        do = "write e.g. evenload run recipe.yaml -- torchrun --nproc-per-node 2 train.py"
        raise EvenloadError("there is no such command", repr(command[0]) if command else "nothing behind --", do)
    with tempfile.TemporaryDirectory(prefix="evenload-") as started:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "EVENLOAD_RECIPE": str(Path(recipe).absolute()),
            "EVENLOAD_TRAINER": _FIRST_IMPORTS[trainer],
            "EVENLOAD_STARTED": started,
        }
        code = _wait(subprocess.Popen(list(command), env=environment))
        if not any(Path(started).iterdir()):
            missed = f"no process of this command on this machine imported {_FIRST_IMPORTS[trainer]}"
            print(f"evenload: {missed}; nothing was switched on", file=sys.stderr)
    return code


def _wait(child: subprocess.Popen[bytes]) -> int:
    """The child's exit code as a shell gives it. SIGTERM and SIGHUP are passed on; Ctrl-C reaches it by itself."""

    def forward(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
