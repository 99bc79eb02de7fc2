"""A pool of gloo ranks that stays up for a test module: ``pool.run("job", ...)`` calls a function of jobs.py in each."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Pool:
    """``size`` processes that join one world over a file store."""

    def __init__(self, size: int, store: Path) -> None:
        self.size = size
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(HERE / "workers.py"), str(rank), str(size), str(store)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(size)
        ]

    def run(self, job: str, **kwargs: Any) -> list[Any]:
        """Results of ``jobs.<job>(world, **kwargs)`` by rank; the first exception of a rank is raised here."""
        for process in self._ranks:
            pickle.dump((job, kwargs), process.stdin)
            process.stdin.flush()
        answers = [pickle.load(process.stdout) for process in self._ranks]
        for rank, (failed, answer) in enumerate(answers):
            if failed:
                raise AssertionError(f"rank {rank} of {self.size}:\n{answer}")
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self._ranks:
            process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def main(rank: int, size: int, store: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    from evenload.patches import bridge_cpu

    bridge_cpu()
    import datetime

    import torch
    import torch.distributed as dist
    from evenload.runtime.world import World

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    spec = importlib.util.spec_from_file_location("megatron_jobs", HERE / "jobs.py")
    jobs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(jobs)
    world = World(rank, size, torch.device("cpu"), owned=False)
    while True:
        try:
            job, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)
        try:
            answer = (False, getattr(jobs, job)(world, **kwargs))
        except BaseException:
            answer = (True, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
