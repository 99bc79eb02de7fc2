"""python forked.py RANKS SCRIPT ARGUMENT...: runs a script of Megatron-LM as so many ranks of one machine.

The ranks are forks of a process that has imported Megatron-LM already, which is most of what a short run takes; the
rest is as under torchrun: its variables, and the first exit code that is not 0 ends the others after a while.
"""

import contextlib
import os
import runpy
import signal
import socket
import sys
import time
from importlib import import_module
from pathlib import Path

GRACE_S = 20.0
"""After one rank has failed the others have this long to end by themselves."""


def run_rank(rank: int, ranks: int, port: int, script: str) -> int:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def main() -> None:
    ranks, script = int(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(script).parent))
    for name in ("megatron.core", "megatron.training", "megatron.core.models.gpt.gpt_layer_specs"):
        import_module(name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    waiting = {}
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            code = 1
            try:
                code = run_rank(rank, ranks, port, script)
                if startup := sys.modules.get("megatron_lm"):
                    startup.leave(rank)  # a fork ends without what was registered for its end
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        waiting[child] = rank
    sys.exit(wait(waiting))


def wait(waiting: dict[int, int]) -> int:
    """The first exit code that is not 0, when all ranks have ended."""
    first, deadline = 0, float("inf")
    while waiting:
        for child in list(waiting):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del waiting[child]
                first = first or os.waitstatus_to_exitcode(status)
        if first:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            for child in waiting:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    return first


if __name__ == "__main__":
    main()
