"""Activations up and gradients down between the pipeline stages of one plane rank, in the order of a plan.

Trainers' own communicators wait for every send and, for packs of unequal length, exchange shapes first. A plan with an
order of its own may let two neighbours both send before either receives, which would hang there. Here the plan gives
the shapes, a send never waits, and each direction between two stages has a process group (on NCCL: a communicator and
stream) to itself, also where groups have their communicators from the start and all that one of them does is in order.

A sent tensor stays alive until the neighbour has it. gloo tells that only to who waits, so nobody asks: what the
neighbour sends back shows, by the plan, how much it had taken before, and waiting for that much costs nothing.

Where a GPU runs all streams in one queue, a second send on a link would stop it until the first is taken; there results
are held back until their turn (`core.simulate.one_queue`).

A device of two stages (`Limits.v_shape`) has links for each, those of the later one along the devices backwards, and
where the V turns one stage hands over to the other on the device itself (`v_links`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...core.aliases import Ranks
from ...core.errors import EvenloadError
from ...core.plan.order import DIRECTIONS
from ...core.plan.step_plan import Op, PassKind
from ..world.plane import own_group


class StageLinks:
    """The links of this rank to the stages before and after it; lives as long as its host. Made by all ranks together.

    ``rows``: every pipeline of the world, its world ranks, first stage first; equal on all ranks (see `rows_of_all`).
    ``inside``: by direction and micro-batch, what stages of this device hand to each other. Raises as `own_group`.
    """

    def __init__(self, rows: Sequence[Ranks], inside: dict[PassKind, dict[int, Tensor]] | None = None) -> None:
        (ranks,) = (row for row in rows if dist.get_rank() in row)
        stage = ranks.index(dist.get_rank())
        # A link to the stage after an even one, and after an odd one; up and down.
        count = 2 if max(map(len, rows)) > 2 else 1
        self._groups = [{kind: own_group(pairs(rows, first))[1] for kind in DIRECTIONS} for first in range(count)]
        self._after, self._before = self._groups[stage % count], self._groups[(stage - 1) % count]
        self.one_queue = has_one_queue(dist.get_backend_config(self._after["F"]))
        """A result waits for its turn; `begin` must be told so."""
        before, after = ranks[max(0, stage - 1) : stage], ranks[stage + 1 : stage + 2]
        self._source = {"F": before, "B": after}
        self._target = {"F": after, "B": before}
        self._inside = inside
        self.beside: StageLinks | None = None
        """Those of the other stage of this device."""
        self._held: dict[str, deque[tuple[Op, Tensor]]] = {kind: deque() for kind in DIRECTIONS}
        self._holds = False
        self._sent: dict[str, deque[tuple[Any, Tensor]]] = {"F": deque(), "B": deque()}
        self._taken = {"F": 0, "B": 0}
        self._in_step = False

    def begin(self, *, holds: bool = False) -> None:
        """Call it before the first pass of a step. ``holds``: results wait for their `turn`. Raises EvenloadError: the
        step before never came to `finish`. What its stages sent and nobody took would be taken for what this step
        sends."""
        if self._in_step:
            raise EvenloadError(
                "the step before failed halfway, and what its pipeline stages sent is still on the way",
                "an error that was caught",
                "let the error end the job, and start again from the last checkpoint",
            )
        self._in_step, self._holds = True, holds

    def turn(self, kind: PassKind) -> None:
        """Issue the first result of a direction that was held back."""
        self._issue(*self._held[kind].popleft())

    def send(self, op: Op, tensor: Tensor) -> None:
        """Hand on what a pass gave: up after F, down after B. The tensor must not be written to from here on."""
        tensor = tensor.detach().contiguous()
        if self._inside is not None and not self._target[op.kind]:
            self._inside[op.kind][op.micro_batch] = tensor
        elif self._holds:
            self._held[op.kind].append((op, tensor))
        else:
            self._issue(op, tensor)

    def _issue(self, op: Op, tensor: Tensor) -> None:
        (peer,) = self._target[op.kind]
        group = (self._after if op.kind == "F" else self._before)[op.kind]
        work = dist.isend(tensor, peer, group=group, tag=op.micro_batch)
        self._sent[op.kind].append((work, tensor))

    def receive(self, op: Op, like: Tensor, taken: int) -> Tensor:
        """What a pass starts from: F from the stage before, B from the stage after; in ``like``, if it comes from
        elsewhere. ``taken``: how many tensors of the other direction the neighbour had taken before this pass
        (`taken_before`)."""
        if self._inside is not None and not self._source[op.kind]:
            return self._inside[op.kind].pop(op.micro_batch).view_as(like)
        (peer,) = self._source[op.kind]
        group = (self._before if op.kind == "F" else self._after)[op.kind]
        dist.recv(like, peer, group=group, tag=op.micro_batch)
        self._release("B" if op.kind == "F" else "F", taken)
        return like

    def wait_for_sends(self, most: int) -> None:
        """Wait until the stage after has all but so many of the outputs that it was sent: nothing that comes back
        would tell, where no backward follows."""
        self._release("F", self._taken["F"] + len(self._sent["F"]) - most)

    def release_beside(self, taken: int) -> None:
        """So many outputs of the other stage of this device have been taken."""
        assert self.beside is not None
        self.beside._release("F", taken)

    def finish(self) -> None:
        """Wait until the neighbours have everything; call it at the end of a step, when all turns have come."""
        for kind in DIRECTIONS:
            self._release(kind, self._taken[kind] + len(self._sent[kind]))
            self._taken[kind] = 0
        self._in_step = False

    def close(self) -> None:
        """Destroy the groups; on every rank."""
        self._sent = {"F": deque(), "B": deque()}
        for link in self._groups:
            for group in link.values():
                dist.destroy_process_group(group)
        self._groups = []

    def _release(self, kind: str, taken: int) -> None:
        while self._taken[kind] < taken:
            work, _ = self._sent[kind].popleft()
            work.wait()
            self._taken[kind] += 1


def v_links(rows: Sequence[Ranks]) -> tuple[StageLinks, StageLinks]:
    """The links of both stages of this device, the earlier stage first. ``rows``: as for `StageLinks`, by device."""
    inside: dict[PassKind, dict[int, Tensor]] = {kind: {} for kind in DIRECTIONS}
    links = StageLinks(rows, inside), StageLinks([row[::-1] for row in rows], inside)
    links[0].beside, links[1].beside = links[1], links[0]
    return links


def pairs(rows: Iterable[Ranks], first: int) -> list[Ranks]:
    """The ranks of neighbouring stages, from stage ``first`` on by twos; who has no neighbour there is alone."""
    return [
        pair for row in rows for pair in (row[:first], *(row[i : i + 2] for i in range(first, len(row), 2))) if pair
    ]


def has_one_queue(backends: str) -> bool:
    """Whether a stuck send holds up what is issued after it, on whatever stream. ``backends``: as torch writes them,
    "cpu:gloo,cuda:nccl"."""
    return "nccl" in backends and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


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
