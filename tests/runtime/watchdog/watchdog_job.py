"""A small job for test_watchdog.py: every rank steps through collectives until the culprit does something bad.

watchdog_job.py HOW CULPRIT, under torchrun, or anything else that sets its variables; where STORE names a file, the
ranks meet there. Limits come from LIMITS, a JSON object of the arguments of Watchdog, and PG_TIMEOUT_S. STEPS says how
many steps there are, and READY names a file that is there from the third on.
"""

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from evenload.core.errors import EvenloadError
from evenload.runtime.watchdog.watchdog import Watchdog
from evenload.runtime.world.agreement import agree
from evenload.runtime.world.world import close_world, init_world


def misbehave(how: str, rank: int) -> None:
    if how == "raise":
        raise ValueError("bad sample 1234")
    if how == "refuse":
        raise EvenloadError("the data ran out", "3 samples", "shorten the run")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "kill once" and not Path(os.environ["KILLED"]).exists():
        Path(os.environ["KILLED"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hang":
        time.sleep(1000)
    if how == "leave":
        sys.exit(0)


def work_long(culprit: bool, dog: Watchdog) -> None:
    """Twice the limit: the culprit in one go, the others in small pieces."""
    long_s = 2 * json.loads(os.environ["LIMITS"])["stuck_s"]
    for _ in range(1 if culprit else 20):
        time.sleep(long_s / (1 if culprit else 20))
        dog.at("step 3: forward", 3)


CHILD = "import time; end = time.monotonic() + float(__import__('sys').argv[1])\nwhile time.monotonic() < end: pass"


def work_without_marks(how: str, dog: Watchdog) -> None:
    """A phase of twice the limit: a child computes, this process reads, or nothing happens."""
    long_s = 2 * json.loads(os.environ["LIMITS"])["stuck_s"]
    with dog.working("converting"):
        if how == "child works":
            subprocess.run([sys.executable, "-c", CHILD, str(long_s)], check=True)
        end_s = time.monotonic() + long_s
        while how == "reads" and time.monotonic() < end_s:
            with open("/dev/zero", "rb") as zeros:
                zeros.read(1 << 20)
            time.sleep(0.05)
        if how == "stands still":
            time.sleep(1000)


def work(how: str, culprit: int, rank: int, dog: Watchdog) -> None:
    for step in range(int(os.environ.get("STEPS", "6"))):
        if step == 2 and "READY" in os.environ:
            Path(os.environ["READY"]).touch()
        dog.at(f"step {step}: forward", step)
        if step == 3 and rank == culprit:
            misbehave(how, rank)
        if step == 3 and how == "long":
            work_long(rank == culprit, dog)
        if step == 3 and rank == culprit and how in ("child works", "reads", "stands still"):
            work_without_marks(how, dog)
        if step == 3 and how == "diverge":
            agree(bytes([rank == culprit] * 16), "plans", step)
        dog.at(f"step {step}: gradients", step, waits=True)
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.02)


def main() -> None:
    how, culprit = sys.argv[1:]
    timeout_s = float(os.environ.get("PG_TIMEOUT_S", "100"))
    if "STORE" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place, timeout = f"file://{os.environ['STORE']}", datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size, timeout=timeout)
    world = init_world(timeout_s)
    with Watchdog(**json.loads(os.environ["LIMITS"])) as dog:
        work(how, int(culprit), world.rank, dog)
    print("survived", flush=True)
    close_world(world)


if __name__ == "__main__":
    main()
