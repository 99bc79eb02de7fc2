"""The processes of one job: start from torchrun's environment, end together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ...core.errors import refuse_first
from ...core.input.bounds import RANKS
from ...core.machine.replicas import refuse_other_size
from ..watchdog.meeting import meet
from .agreement import everyone
from .replicas import job_group, join, lead, leads
from .variables import integer, job_variables


@dataclass(frozen=True)
class World:
    """This process among the ranks of its job."""

    rank: int
    size: int
    device: torch.device
    owned: bool = True
    """Whether `init_world` made the process group, so that `close_world` may destroy it."""
    replica: int = 0
    """Which replica of the job this is the world of; a job without replicas is one."""

    @property
    def leads(self) -> bool:
        """Whether this is the rank that speaks and writes for the whole job."""
        return leads(self.rank)


def init_world(timeout_s: float = 1800.0, gone_s: float = 30.0, replicas: Sequence[int] = ()) -> World:
    """Join the job that torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) describe.

    Without RANK and WORLD_SIZE this is a world of one, with a process group all the same, so that hosts which insist on
    one work. A process group that exists already is taken as it is.

    Args:
        timeout_s: after which a rank that does not come is given up, and a collective that a peer does not join fails.
        gone_s: after which a rank that has come and does not beat any more is gone.
        replicas: ranks of each replica of the job, which become worlds of their own (`replicas`); none: there is one.

    Raises:
        EvenloadError: some of the variables are missing or make no sense (`variables.job_variables`), or replicas do
            not fill the job.
        RankError: rank 0 cannot be reached.
    """
    lead(None)
    cuda = torch.cuda.is_available()
    if cuda:
        device = torch.device("cuda", integer("LOCAL_RANK", 0, 0, RANKS) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if dist.is_initialized():
        refuse_first((len(replicas) > 1, "replicas need process groups of their own", "one is there", "start anew"))
        return World(dist.get_rank(), dist.get_world_size(), device, owned=False)

    if "OMP_NUM_THREADS" not in os.environ:
        # Ranks that share a host share its cores; each of them would take all otherwise.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // integer("LOCAL_WORLD_SIZE", 1, 1, RANKS)))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    job = job_variables()
    if replicas:
        refuse_other_size(replicas, job.size if job else 1)
    if job is None:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
    else:
        meet(backend, *job, timeout_s=timeout_s, gone_s=gone_s, replicas=replicas)
    across = job_group()
    return World(dist.get_rank(), dist.get_world_size(), device, replica=across.place.replica if across else 0)


def close_world(world: World) -> None:
    """Wait for every rank and leave the job; call it after the `Watchdog` has ended, where all went well."""
    if world.owned and dist.is_initialized():
        everyone(None, "job")
        join(None)
        dist.destroy_process_group()
