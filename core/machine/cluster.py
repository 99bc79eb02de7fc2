"""The machines: ranks per node, compute rate, memory, and links with latency and bandwidth.

Collective times follow the alpha-beta model of ring algorithms (Thakur et al., IJHPCA 2005, section 4): n ranks, m
bytes per rank, latency a, bandwidth b,

    all-gather, reduce-scatter   (n - 1) * (a + m / b)          m = bytes each rank contributes
    all-reduce                   2 (n - 1) * (a + m / (n b))    m = bytes each rank holds
    all-to-all                   (n - 1) * (a + m / (n b))      m = bytes each rank sends in total

A group that spans nodes runs at the inter-node link. Where a cluster lists measured rates of all-to-all by group size,
they are taken instead: m / rate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeFloat, PositiveFloat

from ..errors import EvenloadError, nearest, shorten, shown
from ..input import reading
from ..input.bounds import RankCount, refuse_odd_numbers
from ..input.validation import Frozen, described

Bytes = TypeVar("Bytes", float, npt.NDArray[np.float64])


class Link(Frozen):
    """One direction of a link, per rank."""

    latency_s: NonNegativeFloat
    bytes_per_s: PositiveFloat

    def send_s(self, num_bytes: Bytes, calls: float = 1) -> Bytes:
        """``num_bytes``, a number or an array, are those of all ``calls`` together; so in all that follow."""
        return calls * self.latency_s + num_bytes / self.bytes_per_s

    def all_gather_s(self, num_bytes: Bytes, num_ranks: int, calls: float = 1) -> Bytes:
        """Also a reduce-scatter. ``num_bytes``: what each rank contributes (receives, in a reduce-scatter)."""
        return (num_ranks - 1) * self.send_s(num_bytes, calls)

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        return 2 * (num_ranks - 1) * self.send_s(num_bytes / num_ranks)

    def all_to_all_s(self, num_bytes: Bytes, num_ranks: int, calls: float = 1) -> Bytes:
        return (num_ranks - 1) * self.send_s(num_bytes / num_ranks, calls)


class Cluster(Frozen):
    """A homogeneous cluster. Every number carries its origin in ``source``."""

    name: str
    source: str
    ranks_per_node: RankCount
    flops_per_s: PositiveFloat
    """Sustained matrix throughput of one device at the training precision."""
    launch_s: NonNegativeFloat = 0.0
    """Constant time of one forward pass of one micro-batch."""
    memory_bytes: PositiveFloat
    intra: Link
    inter: Link
    all_to_all_bytes_per_s: dict[RankCount, PositiveFloat] = Field(default={})
    """Measured rates of all-to-all by group size, where known: bytes that a rank sends in total, a second."""
    host_bytes_per_s: PositiveFloat | None = None
    """From a device's memory to its host's, the slower direction; None: nothing can be left there."""

    def link_among(self, ranks: Iterable[int]) -> Link:
        """The slowest link that a group of these ranks of the world must use."""
        nodes = {rank // self.ranks_per_node for rank in ranks}
        return self.intra if len(nodes) <= 1 else self.inter

    def all_to_all_s(self, num_bytes: Bytes, ranks: Collection[int], calls: float = 1) -> Bytes:
        """``num_bytes``: what each rank sends in total, in ``calls`` all-to-alls together."""
        rate = self.all_to_all_bytes_per_s.get(len(ranks))
        return num_bytes / rate if rate else self.link_among(ranks).all_to_all_s(num_bytes, len(ranks), calls)


def load(name: str, folder: Path) -> Cluster:
    """Read a cluster from a YAML file, or the one of that name in ``folder``. Raises EvenloadError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not reading.is_file(path):
        known = sorted(p.stem for p in folder.glob("*.yaml"))
        raise EvenloadError("there is no such cluster", shown(name), f"give a file or a name; {nearest(name, known)}")
    file, do = shorten(str(path)), "compare it with recipes/clusters"
    data = reading.read_yaml(path, f"the cluster {file}", do)
    cluster = described(data, Cluster, f"{file} is not a cluster description", do)
    refuse_odd_numbers(data, file)
    return cluster
