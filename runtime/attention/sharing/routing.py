"""Messages between nodes spread over the links of all ranks: scatter in one node, parallel links, gather in the other.

A message from a rank of node A to one of node B is cut into x parts, x the smaller number of ranks that its CP group
has in either. Part k goes to the k-th of them in A, from there to the k-th in B, and on to the receiver, so that x
links carry what one did (the routing layer of Zeppelin, arXiv 2509.21841). Messages inside a node go as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ....core.aliases import Ranks
from ...world.plane import Pending, Plane


class RankMessage(NamedTuple):
    """Between plane ranks; all members of a CP group list the same messages in the same order."""

    source: int
    to: int
    size: int
    """Elements."""


class Leg(NamedTuple):
    """Elements first .. end-1 of a message on a part of their way."""

    message: int
    first: int
    end: int
    source: int
    to: int


def legs_of(messages: Sequence[RankMessage], members: Ranks, node_ranks: int) -> tuple[list[Leg], list[Leg], list[Leg]]:
    """What goes before, between and after nodes; a leg from a rank to itself is left out."""
    nodes: dict[int, list[int]] = {}
    for rank in sorted(members):
        nodes.setdefault(rank // node_ranks, []).append(rank)
    stages: tuple[list[Leg], list[Leg], list[Leg]] = [], [], []
    for number, message in enumerate(messages):
        here, there = (nodes[rank // node_ranks] for rank in (message.source, message.to))
        if here is there:
            stages[2].append(Leg(number, 0, message.size, message.source, message.to))
            continue
        links = min(len(here), len(there))
        for link in range(links):
            first, end = (i * message.size // links for i in (link, link + 1))
            route = message.source, here[link], there[link], message.to
            for stage, (source, to) in zip(stages, pairwise(route), strict=True):
                if source != to:
                    stage.append(Leg(number, first, end, source, to))
    return stages


class PendingLegs:
    """Like `Pending`, for messages that have several legs."""

    def __init__(
        self,
        plane: Plane,
        messages: Sequence[RankMessage],
        members: Ranks,
        tensors: Mapping[int, Tensor],
        tags: Sequence[int],
        like: Tensor,
    ) -> None:
        """Post them. The first two stages are waited for: by the host on gloo, by a stream next to its own on CUDA.

        Args:
            tensors: contiguous; what this rank sends and what it is to receive, by the message's place.
            tags: three, one for each stage.
        """
        stages = legs_of(messages, members, plane.node_ranks)
        ends = {number: t.view(-1) for number, t in tensors.items()}
        carried: dict[tuple[int, int], Tensor] = {}

        def part(leg: Leg) -> Tensor:
            if leg.message in ends:
                return ends[leg.message][leg.first : leg.end]
            return carried.setdefault((leg.message, leg.first), like.new_empty(leg.end - leg.first))

        self._device, self._pending = like.device, Pending((), (), ())
        self._kept = carried, ends
        with _beside(self._device, begins=True):
            for stage, tag in zip(stages, tags, strict=True):
                self._pending.wait()
                sends = [(leg.to, part(leg)) for leg in stage if leg.source == plane.rank]
                receives = [(leg.source, part(leg)) for leg in stage if leg.to == plane.rank]
                self._pending = plane.post(sends, receives, tag)

    def wait(self) -> None:
        with _beside(self._device, begins=False):
            self._pending.wait()


_streams: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def _beside(device: torch.device, begins: bool) -> Iterator[None]:
    """Work on a stream next to the current one: it begins after what is there, or the current one goes on after it."""
    if device.type != "cuda":
        yield
        return
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream, current = _streams[device], torch.cuda.current_stream(device)
    if begins:
        stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    if not begins:
        current.wait_stream(stream)
