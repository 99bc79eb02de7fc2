"""Runs cases of the fuzz: a process that has imported evenload, without torch unless cases are of what users bring
along (`brought`), and forks one child a case.

child.py FOLDER [plots] [brought]. A case is a line of JSON on stdin, its answer one on stdout (`cases.Case`,
`cases.Answer`). In the child the launcher, the work of a rank and foreign commands are replaced by an ending that says
they were reached; whatever is written, started or unpickled is told by an audit hook.
"""

import gc
import json
import os
import resource
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

MEMORY_BYTES = 4 << 30
HANG_S = 40.0
"""By the wall, on a busy machine; CPU seconds are what cases are held to."""
_SHOWN = 200_000

_WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
_SANDBOX = "evenload.core.input.sandbox"
"""The process in which templates and patterns run, which may be started; it writes nothing."""
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn", "pickle.find_class")


class Reached(BaseException):
    """The case got as far as what is replaced here."""


def prepare(plots: bool) -> None:
    """Import what verbs import, some of it by doing it once, and replace what they start."""
    import numpy as np
    import typer.main
    import typer.rich_utils
    from evenload import cli
    from evenload.api import load_plugins
    from evenload.commands import run
    from evenload.core.recipe.recipe import parse
    from evenload.core.registry import StepPlugin, registered
    from evenload.integrations.unmodified import section as config  # noqa: F401
    from evenload.training import preflight
    from evenload.training.forecast import forecast as plan
    from evenload.training.launching import launch
    from evenload.training.pictures import trace  # noqa: F401

    if plots:
        import matplotlib.font_manager  # noqa: F401
        from evenload.plugins.report import plot  # noqa: F401
        from matplotlib.figure import Figure  # noqa: F401
    load_plugins()
    with suppress(ModuleNotFoundError):
        from evenload.plugins.report import page  # noqa: F401
    for name in (plugin.name for plugin in registered() if isinstance(plugin, StepPlugin)):
        setting = {"enabled": True, "max_tokens": 8192}
        recipe = parse({"plugins": {name: setting}, "parallel": {"dp": 2}, "train": {"global_batch_size": 4}})
        plan.look_ahead(recipe, np.arange(5, 60), 1)
    preflight.preflight(recipe)
    gc.freeze()  # children then leave its pages as they are

    def launched(*_: Any) -> None:
        raise Reached("launch")

    def on_ranks(*_: Any, **__: Any) -> None:
        raise Reached("rank")

    class Processes:
        def __getattr__(self, name: str) -> Any:
            raise Reached("command")

    cli.app = typer.main.get_command(cli.app)  # type: ignore[assignment]  # which it would build anew in every child
    dict(cli.app.commands)  # type: ignore[attr-defined]  # each is made when it is asked for
    launch.launch = launched  # type: ignore[assignment]
    refuses = launch.resolve_name
    launch.resolve_name = lambda name: refuses(name) if name.endswith((":asked", ":refuse_proof")) else on_ranks
    run.subprocess = Processes()  # type: ignore[assignment, attr-defined]


def place(name: str, content: dict[str, Any]) -> None:
    """Make one file of a case: its text or its bytes in hex, so many times, or what is not a regular file."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    if "text" in content or "hex" in content:
        data = content["text"].encode("utf-8", "surrogatepass") if "text" in content else bytes.fromhex(content["hex"])
        Path(name).write_bytes(data * content.get("times", 1))
    elif content["kind"] == "pipe":
        os.mkfifo(name)
    elif content["kind"] == "folder":
        os.mkdir(name)
    elif content["kind"] == "link":
        os.symlink(content["to"], name)
    elif content["kind"] == "hole":
        with open(name, "wb") as file:
            file.truncate(content["size"])
    else:
        raise AssertionError(content)


def act(case: dict[str, Any]) -> Any:
    """What the case asks for: the command line, or an expression over the Python face."""
    if "call" in case:
        import itertools

        import evenload
        import numpy as np
        from evenload.core.plan_json import read_plans
        from evenload.integrations.unmodified.section import parse_section, recipe_of

        known = {"np": np, "evenload": evenload, "itertools": itertools, "read_plans": read_plans}
        known |= {"parse_section": parse_section, "recipe_of": recipe_of}
        if doors := sys.modules.get("doors"):
            known |= {"admit": doors.admit, "logged": doors.logged, "sampled": doors.sampled, "scored": doors.scored}
        return eval(case["call"], known)
    from evenload.cli import main

    sys.argv = ["evenload", *case["argv"]]
    return main()


def watch(events: list[str], kept: tuple[str, ...]) -> None:
    """Note what is written outside of the folders ``kept`` (the case's own, the cache) and what is started."""
    here = os.getcwd()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS and not (event == "subprocess.Popen" and _SANDBOX in arguments[1]):
            events.append(f"{event} {arguments!r:.100}")
        elif event == "open":
            path, _, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) if isinstance(flags, int) else False
            if writes and isinstance(path, (str, bytes)):
                note(event, path)
        elif event in _WRITES:
            note(event, arguments[0])

    def note(event: str, path: Any) -> None:
        full = os.path.join(here, os.fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if full and not full.startswith((*kept, "/dev/")):
            events.append(full)

    sys.addaudithook(hook)


def child(case: dict[str, Any], here: Path, cache: str, answer: int) -> None:
    """Run the case in this process and write how it ended to ``answer``."""
    os.setsid()
    os.chdir(here / "work")
    for name, content in case.get("files", {}).items():
        place(name, content)
    os.environ.update(EVENLOAD_CACHE=cache, HOME=str(here), TMPDIR=str(here / "tmp"), COLUMNS="100")
    os.environ.update(case.get("env", {}))
    tempfile.tempdir = str(here / "tmp")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(here / name, os.O_CREAT | os.O_RDWR | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    before = listing(here)
    events: list[str] = []
    end, message = "done", ""
    watch(events, (cache, str(here)))
    try:
        act(case)
    except Reached as reached:
        end = str(reached)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        end = f"exit {code}"
    except BaseException as error:
        from evenload.core.errors import EvenloadError, RankError

        if isinstance(error, EvenloadError) and not isinstance(error, RankError) and "call" in case:
            end, message = "refused", str(error)
        else:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "evenload" in f.filename]
            at = f"{'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}" if frames else "?"
            end, message = "traceback", f"{type(error).__name__} at {at}: {error!s:.300}"
    sys.stdout.flush()
    sys.stderr.flush()
    after = listing(here)
    written = sorted(after.keys() - before.keys())
    changed = sorted(os.path.relpath(name, here) for name, state in before.items() if after.get(name) != state)
    events = [event for event in events if not event.startswith("/") or os.path.lexists(event)]  # others were tried
    told = {"end": end, "message": message, "written": written, "events": events[:20], "changed": changed}
    os.write(answer, json.dumps(told).encode())


def listing(here: Path) -> dict[str, Any]:
    """Everything below a folder, and what tells whether it was changed; nothing tells that of folders and of output."""
    names = [os.path.join(folder, name) for folder, below, names in os.walk(here) for name in (*below, *names)]
    return {name: None if os.path.isdir(name) or os.path.dirname(name) == str(here) else _state(name) for name in names}


def _state(name: str) -> tuple[int, ...]:
    state = os.lstat(name)
    return state.st_mode, state.st_ino, state.st_size, state.st_mtime_ns


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The answer to a case, from a child that is killed when it takes too long."""
    here = Path(tempfile.mkdtemp(prefix="case", dir=folder))
    for name in ("work", "tmp"):
        (here / name).mkdir()
    reader, writer = os.pipe()
    start = time.monotonic()
    pid = os.fork()
    if not pid:
        try:
            os.close(reader)
            child(case, here, str(folder / "cache"), writer)
        except BaseException as error:
            os.write(writer, json.dumps({"end": "harness", "message": repr(error)[:500]}).encode())
        finally:
            os._exit(0)
    os.close(writer)
    answer = {"end": "hang", "message": "", "written": [], "events": [], "changed": []}
    text = b""
    while select.select([reader], [], [], max(0.0, start + HANG_S - time.monotonic()))[0]:
        part = os.read(reader, 1 << 16)
        if not part:
            answer = json.loads(text) if text else {**answer, "end": "died"}
            break
        text += part
    os.close(reader)
    if answer["end"] == "hang":
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    answer |= {"cpu_s": usage.ru_utime + usage.ru_stime, "wall_s": time.monotonic() - start, "status": status}
    for name in ("out", "err"):
        path = here / name
        answer[name] = path.read_bytes()[:_SHOWN].decode("utf-8", "replace") if path.exists() else ""
    shutil.rmtree(here, onerror=lambda _, path, __: os.chmod(path, stat.S_IRWXU))
    return answer


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prepare("plots" in sys.argv[2:])
    if "brought" in sys.argv[2:]:
        import doors

        doors.admit_once(Path(sys.argv[1]))
        MEMORY_BYTES <<= 2  # which torch maps much of
        gc.freeze()
    for line in sys.stdin:
        answers.write(json.dumps(run_case(json.loads(line), Path(sys.argv[1]))) + "\n")
        answers.flush()
