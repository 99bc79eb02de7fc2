"""Activations up and gradients down between the pipeline stages of one plane rank, in the order of a plan.

Trainers' own communicators wait for every send and, for packs of unequal length, exchange shapes first. A plan with an
order of its own may let two neighbours both send before either receives, which would hang there. Here the plan gives
the shapes, a send never waits, and each direction has a process group (on NCCL: a communicator and stream) to itself.

A sent tensor stays alive until the neighbour has it. gloo tells that only to who waits, so nobody asks: what the
neighbour sends back shows, by the plan, how much it had taken before, and waiting for that much costs nothing.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...core.aliases import Ranks
from ...core.errors import EvenloadError
from ...core.plan.step_plan import Op
from ..world.groups import own_group

log = logging.getLogger("evenload")


class StageLinks:
    """The links of this rank to the stages before and after it; lives as long as its host. Made by all ranks together.

    ``rows``: every pipeline of the world, its world ranks, first stage first; equal on all ranks (see `rows_of_all`).
    Raises as `own_group`.
    """

    def __init__(self, rows: Sequence[Ranks]) -> None:
        (ranks, up), (_, down) = own_group(rows), own_group(rows)
        self._groups = {"F": up, "B": down}
        stage = ranks.index(dist.get_rank())
        if stage == 0:
            warn_of_one_queue(dist.get_backend(self._groups["F"]))
        before, after = ranks[max(0, stage - 1) : stage], ranks[stage + 1 : stage + 2]
        self._source = {"F": before, "B": after}
        self._target = {"F": after, "B": before}
        self._sent: dict[str, deque[tuple[Any, Tensor]]] = {"F": deque(), "B": deque()}
        self._taken = {"F": 0, "B": 0}
        self._in_step = False

    def begin(self) -> None:
        """Call it before the first pass of a step. Raises EvenloadError: the step before never came to `finish`. What
        its stages sent and nobody took would be taken for what this step sends."""
        if self._in_step:
            raise EvenloadError(
                "the step before failed halfway, and what its pipeline stages sent is still on the way",
                "an error that was caught",
                "let the error end the job, and start again from the last checkpoint",
            )
        self._in_step = True

    def send(self, op: Op, tensor: Tensor) -> None:
        """Hand on what a pass gave: up after F, down after B. The tensor must not be written to from here on."""
        (peer,) = self._target[op.kind]
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, peer, group=self._groups[op.kind], tag=op.micro_batch)
        self._sent[op.kind].append((work, tensor))

    def receive(self, op: Op, like: Tensor, taken: int) -> Tensor:
        """Fill ``like`` with what a pass starts from: F from the stage before, B from the stage behind. ``taken``: how
        many tensors of the other direction the neighbour had taken before this pass (`taken_before`)."""
        (peer,) = self._source[op.kind]
        dist.recv(like, peer, group=self._groups[op.kind], tag=op.micro_batch)
        self._release("B" if op.kind == "F" else "F", taken)
        return like

    def wait_for_sends(self, most: int) -> None:
        """Wait until the stage behind has all but so many of the outputs that it was sent: nothing that comes back
        would tell, where no backward follows."""
        self._release("F", self._taken["F"] + len(self._sent["F"]) - most)

    def finish(self) -> None:
        """Wait until the neighbours have everything; call it at the end of a step."""
        for kind in ("F", "B"):
            self._release(kind, self._taken[kind] + len(self._sent[kind]))
            self._taken[kind] = 0
        self._in_step = False

    def close(self) -> None:
        """Destroy the groups; on every rank."""
        self._sent = {"F": deque(), "B": deque()}
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups = {}

    def _release(self, kind: str, taken: int) -> None:
        while self._taken[kind] < taken:
            work, _ = self._sent[kind].popleft()
            work.wait()
            self._taken[kind] += 1


def warn_of_one_queue(backend: str) -> None:
    """Say that sends may wait: with one hardware queue for all streams, one that is stuck holds up what comes later."""
    if backend == "nccl" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        log.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=1: a second send on a link may stop the device until the first is taken, and "
            "two stages that both run ahead may then wait for each other; leave it unset, or disable plugins.pipeline"
        )


def taken_before(neighbour: Iterable[Op]) -> dict[Op, int]:
    """For each F and B in a neighbour's order, how many passes of the other direction it ran before."""
    done = {"F": 0, "B": 0}
    counts = {}
    for op in neighbour:
        if op.kind == "W":
            continue  # sends nothing, takes nothing
        counts[op] = done["B" if op.kind == "F" else "F"]
        done[op.kind] += 1
    return counts
