"""``evenload run RECIPE -- COMMAND``: the command as it stands, with the plugins on in all its Python processes.

A folder of evenload's own (`startup`) goes on PYTHONPATH, in front. Python looks there for ``sitecustomize`` when it
starts, whoever starts it: torchrun, the deepspeed launcher, a shell script, ``python -m``. The command line need not be
understood or rewritten for that, which would reach no further than the first process. The folder is part of the
installed package and not a temporary one, so that other nodes have it too; the recipe travels in a variable (`env`
prints both). Python started without PYTHONPATH
(``-I``, ``-E``, ``-S``) is not reached.

The last line on stderr says what was planned; where nothing was, why, and which line to change.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import FrameType

from ..api import load_recipe
from ..core.errors import EvenloadError
from ..core.recipe.carried import REQUIRE
from ..core.recipe.recipe import Recipe
from ..core.recipe.traits import trainer_called
from ..integrations.unmodified.run_folder import VARIABLE, RunFolder
from .env import ray_runtime_env, variables

_OF_OUR_LOOP = ("model", "data", "parallel", "train", "planner", "checkpoint", "log", "safety")
"""Sections of a recipe that a script of one's own answers itself."""
_PLANNED_WITH = ("train.recompute", "train.micro_batch_size")
"""Of these, what planners are told about the script all the same."""
_RAY_HOOK = "RAY_RUNTIME_ENV_HOOK"
"""Names what a script that starts or joins a cluster of Ray asks for the variables of its workers."""
_SHOWN = 6
"""Keys that a warning names."""
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_TELL_OF_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


def run(recipe: str | Path, words: Sequence[str], *, required: bool = False) -> int:
    """Run the command to its end; its exit code, or 128 + the signal that ended it.

    Args:
        words: ``key=value`` changes of the recipe, then the command.
        required: a loop that cannot be planned ends with exit code 2, and so does a command that has planned nothing.

    Raises EvenloadError if the recipe is wrong, its trainer is missing, or there is no such command.
    """
    chosen, command = asked(recipe, words)
    with ran(chosen, command, **({REQUIRE: "1"} if required else {})) as (folder, code):
        planned = f"planned {planned_steps(folder)}"
        nothing = f"warning: nothing was planned: {why_nothing(folder, chosen, code)}"
        print(f"evenload: {planned if folder.steps else nothing}", file=sys.stderr)
        return 2 if required and not code and not folder.steps else code


def asked(recipe: str | Path, words: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The recipe, changed by the ``key=value`` words in front of a command, and the command."""
    overrides = list(takewhile(lambda word: "=" in word, words))
    return load_recipe(recipe, overrides), list(words[len(overrides) :])


@contextmanager
def ran(recipe: Recipe, command: Sequence[str], **more: str) -> Iterator[tuple[RunFolder, int]]:
    """`run` without its last line: what the processes, which have ``more`` variables, wrote, and the exit code."""
    own = variables(recipe, os.environ.get("PYTHONPATH", ""))
    if not command or shutil.which(command[0]) is None:
        do = "write e.g. evenload run recipe.yaml -- torchrun --nproc-per-node 2 train.py"
        raise EvenloadError("there is no such command", repr(command[0]) if command else "nothing after --", do)
    if idle := without_effect(recipe):
        keys = ", ".join(idle[:_SHOWN]) + (f" and {len(idle) - _SHOWN} more" if len(idle) > _SHOWN else "")
        why = "the script says what is trained, on what and how; `evenload train` honours them"
        print(f"evenload: warning: the recipe's {keys} have no effect here: {why}", file=sys.stderr)
    environment = {_RAY_HOOK: f"{ray_runtime_env.__module__}.{ray_runtime_env.__name__}", **os.environ, **own, **more}
    tied = partial(_end_with, os.getpid()) if sys.platform == "linux" else None
    with tempfile.TemporaryDirectory(prefix="evenload-") as path:
        environment[VARIABLE] = path
        yield RunFolder(Path(path)), _wait(subprocess.Popen(list(command), env=environment, preexec_fn=tied))


def without_effect(recipe: Recipe) -> list[str]:
    """Keys that a recipe sets and that nothing in a script of one's own reads."""
    chosen = recipe.model_dump(mode="json", exclude_unset=True, include=set(_OF_OUR_LOOP))
    keys = [f"{section}.{key}" for section in _OF_OUR_LOOP for key in chosen.get(section, {})]
    return [key for key in keys if key not in _PLANNED_WITH]


def planned_steps(folder: RunFolder) -> str:
    """``12 steps of Megatron-Core with packing, mesh (no shared micro-batches)``."""
    steps = ", ".join(f"{n} step{'s' * (n != 1)} of {loop}" for loop, n in folder.steps.items())
    plugins = ", ".join(f"{name} ({lacking})" if lacking else name for name, lacking in folder.plugins.items())
    return f"{steps} with {plugins}"


def why_nothing(folder: RunFolder, recipe: Recipe, code: int) -> str:
    """Why no step was planned, and which line to change. ``code``: with which the command has ended."""
    names = " or ".join(trainer_called(recipe.trainer).first_imports)
    if not folder.started:
        return (
            f"no process of this command on this machine imported {names}; nothing was switched on; give the command "
            f"that trains with {recipe.trainer}, or the recipe's trainer: the library that your script imports"
        )
    if folder.refusals:
        return f"{folder.refusals[0].what}; {folder.refusals[0].do}"
    if folder.idle:
        return "; ".join(f"in {loop}, {why}; {do}" for loop, why, do in folder.idle)
    if code:
        return f"the command ended with exit code {code} before its first planned step; mend what it says above"
    if not recipe.enabled():
        return "the recipe enables no plugin; add plugins: {packing: {enabled: true}}"
    return (
        f"a process imported {names}, but no loop that evenload knows reached a step; let the script "
        f"{trainer_called(recipe.trainer).planned_where}"
    )


def _wait(child: subprocess.Popen[bytes]) -> int:
    """The child's exit code as a shell gives it. Signals are passed on; Ctrl-C of a terminal reaches it by itself."""

    def forward(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT or not _has_terminal():
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _has_terminal() -> bool:
    """Whether this process is in the foreground of a terminal, which sends its Ctrl-C to the child too."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _end_with(parent: int) -> None:
    """Have this child told to end when its parent is killed, before it becomes the command."""
    ctypes.CDLL(None).prctl(_TELL_OF_PARENT, signal.SIGTERM)
    if os.getppid() != parent:  # killed before it could be told
        os._exit(128 + signal.SIGTERM)
