"""Forks the ranks of jobs and of test worlds from one process that has imported a trainer already (see forge.py).

forge_process.py TRAINER DOOR; cuda+TRAINER: with ranks that have a rehearsed GPU (see rehearsal), cuda+kernels+TRAINER:
where flash-attn and Transformer Engine are installed, too. A pytest process connects to the socket DOOR and gets a fork
of its own. A request is a line of JSON; the answer is a list of numbers, and what it cost:

    {"job": ...}    runs a command or a script as so many ranks: their exit codes, negative for a signal. The content is
                    its folder, the arguments of ``evenload`` or of the script, the ranks, a port, the folder of its
                    outputs, and whether planted.py in there runs first in every rank. A rank of the forge is as one of
                    torchrun: the launcher alone is left out.
    {"start": ...}  starts a script as one rank with an environment, and does not wait for it: its process id.
    {"poll": PID}   the exit code of such a rank, or nothing while it runs.
    {"world": ...}  starts ranks that serve cases (see rank.py): their process ids.
    {"end": [...]}  ends these processes: their exit codes.
"""

import gc
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from select import select
from types import FunctionType
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])

from harness import counts, groups  # noqa: E402
from harness.rank import serve  # noqa: E402

GRACE_S = 30.0
"""After one rank has failed the others have this long to end by themselves, as under the launcher."""
MODULES = {
    "megatron": (
        "harness.proof",
        "evenload.integrations.megatron.host",
        "evenload.integrations.megatron.plain",
        "safetensors.torch",
        "transformers.models.llama.modeling_llama",
        "transformers.models.auto.tokenization_auto",
    ),
    "deepspeed": (
        "harness.proof",
        "evenload.integrations.deepspeed.engine.host",
        "evenload.integrations.deepspeed.plain",
        "transformers.models.llama.modeling_llama",
        "torch._inductor.compile_fx",  # which DeepSpeed makes torch import in the first step
    ),
    "huggingface": (
        "accelerate",
        "datasets",
        "deepspeed",
        "peft",
        "transformers.trainer",
        "trl.trainer.dpo_trainer",
        "trl.trainer.sft_trainer",
        "transformers.models.llama.modeling_llama",
        "torch._inductor.compile_fx",
    ),
    "torch": ("torch._dynamo",),
}


COSTS: Counter[str] = Counter()
"""What the ranks that were waited for since the last answer cost."""
INHERITED: list[socket.socket] = []
"""Connections that a rank has no use for."""


def warm(trainer: str) -> None:
    """Import what a rank imports, and start neither a thread nor a group; "torch": that and nothing of ours."""
    on_gpu, _, trainer = trainer.rpartition("+")
    if on_gpu:
        import rehearsal

        rehearsal.install()
    if on_gpu.endswith("kernels"):
        from rehearsal import packages

        packages.install(**packages.VERSIONS)
    if trainer != "torch":
        from evenload.api import load_plugins
        from evenload.cli import main  # noqa: F401
        from evenload.training.launching import launch  # noqa: F401
        from evenload.training.verbs import bench, train, verify  # noqa: F401

        for name in ("bench", "progress", "train", "verify"):
            import_module(f"evenload.commands.tables.{name}")
        load_plugins()
        warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|deepspeed)\.")
    if trainer == "huggingface":
        os.environ["HF_HUB_OFFLINE"] = "1"  # read at the import
        # Compiles hundreds of regular expressions when a process reads its first weights.
        import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    if trainer == "megatron":
        from evenload.patches import bridge_cpu

        bridge_cpu()
    for name in MODULES[trainer]:
        import_module(name)
    counts.count_calls()
    groups.share_device()


def plant(path: Path) -> None:
    """Run a script that replaces functions of modules; who has imported such a function by name gets the new one."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "evenload"]
    before = [
        (module, name, value)
        for module in modules
        for name, value in list(vars(module).items())
        if isinstance(value, FunctionType)
    ]
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "planted"})
    changed = {id(value): vars(module)[name] for module, name, value in before if vars(module).get(name) is not value}
    for module, name, value in before:
        if id(value) in changed:
            setattr(module, name, changed[id(value)])


def fork(outputs: str, rank: int, act: Callable[[], None]) -> int:
    """Process id of a new rank that does `act`; its output goes into files."""
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        counts.begin()
        for connection in INHERITED:
            connection.close()
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{outputs}/{name}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        act()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def act_of_job(job: dict[str, Any], rank: int) -> None:
    """What a rank of a job does: the command or the script, with the variables that torchrun would set."""
    os.chdir(job["place"])
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job["ranks"]))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"]), "REHEARSAL_OUT": job["outputs"]}
    sys.argv = [job["script"] or "evenload", *job["arguments"]]
    if job["planted"]:
        plant(Path(job["outputs"]) / "planted.py")
    if job["script"]:
        runpy.run_path(job["script"], run_name="__main__")
    else:
        from evenload.cli import main

        main()


def run(job: dict[str, Any]) -> list[int]:
    """Exit codes of the job's ranks."""
    ranks = range(job["ranks"])
    waiting = {fork(job["outputs"], rank, partial(act_of_job, job, rank)): rank for rank in ranks}
    codes = [0] * job["ranks"]
    deadline = time.monotonic() + job["limit_s"]
    while waiting:
        for pid in list(waiting):
            if ended := reaped(pid, os.WNOHANG):
                (codes[waiting.pop(pid)],) = ended
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return codes


def reaped(pid: int, options: int = 0) -> list[int]:
    """The exit code of a rank that has ended, whose costs are booked; nothing while it runs."""
    ended, status, usage = os.wait4(pid, options)
    if not ended:
        return []
    COSTS.update(forks=1, cpu_s=usage.ru_utime + usage.ru_stime)
    return [os.waitstatus_to_exitcode(status)]


def act_of_script(start: dict[str, Any]) -> None:
    """What a started rank does: the script, with the given environment alone."""
    os.environ.clear()
    os.environ |= start["environment"]
    tempfile.tempdir = None  # it is asked for anew, of this environment
    sys.argv = [start["script"], *start["arguments"]]
    runpy.run_path(start["script"], run_name="__main__")


def start_world(world: dict[str, Any]) -> list[int]:
    """Process ids of the ranks of a new world, which serve until their connection ends."""
    folder, door, size = world["folder"], world["door"], world["size"]
    return [fork(folder, rank, partial(serve, folder, door, rank, size)) for rank in range(size)]


def end_world(pids: list[int]) -> list[int]:
    """Exit codes of the ranks of a world; who is still there is killed."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


REQUESTS: dict[str, Callable[[Any], list[int]]] = {
    "job": run,
    "start": lambda start: [fork(start["outputs"], 0, partial(act_of_script, start))],
    "poll": lambda pid: reaped(pid, os.WNOHANG),
    "world": start_world,
    "end": end_world,
}


def serve_tests(connection: socket.socket) -> None:
    """Answer the requests of one pytest process until its connection ends. Of a fork: its ranks are its children."""
    requests, answers = connection.makefile("r"), connection.makefile("w")
    INHERITED.append(connection)
    for line in requests:
        ((request, content),) = json.loads(line).items()
        numbers = REQUESTS[request](content)
        COSTS.update(counts.since_last_report())
        answers.write(json.dumps([numbers, COSTS]) + "\n")
        COSTS.clear()
        answers.flush()


def main(trainer: str, door: str) -> None:
    """Fork a server for each pytest process that comes; end with the one that has started this process."""
    with socket.socket(socket.AF_UNIX) as listener:
        warm(trainer)
        gc.collect()
        gc.freeze()  # what is shared with the ranks is not written to by their collector
        COSTS.update(cpu_s=time.process_time())
        listener.bind(door)
        listener.listen()
        servers = set()
        while True:
            ready, _, _ = select([listener, sys.stdin], [], [])
            if listener not in ready:
                break
            connection, _ = listener.accept()
            if not (server := os.fork()):
                listener.close()
                counts.begin()
                serve_tests(connection)
                os._exit(0)
            servers.add(server)
            connection.close()
            COSTS.clear()
    shutil.rmtree(Path(door).parent)
    for server in servers:
        os.waitpid(server, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
