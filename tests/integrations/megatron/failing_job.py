"""A rank of a pipeline of two that runs a plan with slices; the last stage cannot read its third micro-batch.

failing_job.py FILE RANK
"""

import sys

import torch.distributed as dist
from evenload.patches import bridge_cpu

bridge_cpu()

from evenload.runtime.watchdog.watchdog import Watchdog  # noqa: E402
from evenload.runtime.world.world import init_world  # noqa: E402
from harness.proof import planned, tokens  # noqa: E402
from megatron_tests.jobs import hosted  # noqa: E402


def main() -> None:
    file, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    good, read = tokens(), []

    def tokens_of(index: int):
        read.append(index)
        if rank == 1 and len(read) > 5:
            raise ValueError("bad sample")
        return good(index)

    with (
        Watchdog(gone_s=20, stuck_s=60, every_s=0.2) as dog,
        hosted(init_world(), parallel__pp=2) as host,
    ):
        plan = planned(host, 3, asymmetric=False, replay="none")
        host.train_step(plan, tokens_of, lr=1e-3, mark=dog.at)
    print("survived", flush=True)


if __name__ == "__main__":
    main()
