"""One rank of a job of tenants: the trainer with its frozen base, and nobody's data until a tenant joins.

Samples of a step are read before it begins: data that cannot be read any more concern their tenant and nobody else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....core.costs.memory import activation_budget_bytes
from ....core.errors import EvenloadError, shorten
from ....core.planning.chain import PlanChain
from ....core.planning.planner import Draw, Planned
from ....core.planning.stock import UNCAPPED
from ....core.recipe.recipe import Recipe
from ....data.samples.cut import IGNORE
from ....data.sources import Source
from ....runtime.attention.labels import Labels
from ....runtime.attention.pack import TokensOf
from ....runtime.watchdog.watchdog import Watchdog
from ....runtime.world.roster import own_replica
from ....runtime.world.world import World
from ....training.job import VerbJob, host_until_end, labels_of
from ....training.replicas import Replicas, without_targets
from ..state.drawing import labels_in
from .preflight import config_of, folder_of_tenants, out_of, preflights


class TenantSamples:
    """Tokens and labels of the batches that this rank computes."""

    def __init__(self) -> None:
        self.sources: dict[int, Source] = {}
        """Of the tenants that take part, by their numbers."""
        self._draw: Draw | None = None
        self._tokens: dict[int, NDArray[np.int64]] = {}
        self._labels: dict[int, NDArray[np.int64]] = {}

    def read(self, planned: Planned, rank: int) -> dict[int, str]:
        """Read what a plane rank computes of a step; by tenant, what is wrong with its data."""
        draw = planned.draw
        assert draw.tenants is not None
        wanted = {s.sequence for m in planned.plan.micro_batches if rank in m.ranks for s in m.slices}
        self._draw = draw
        self._tokens = {}
        self._labels = {}
        faults: dict[int, str] = {}
        for index in sorted(wanted):
            try:
                self._read(draw, index)
            except EvenloadError as error:
                faults.setdefault(int(draw.tenants[index]), str(error))
            except Exception as error:  # of whatever reads the data
                faults.setdefault(int(draw.tenants[index]), shorten(f"{type(error).__name__}: {error}"))
        return faults

    def tokens_of(self, draw: Draw) -> TokensOf:
        """Reads one sequence of a batch, if it was not read before its step."""
        kept = self._tokens if draw is self._draw else {}
        return lambda index: (
            kept[index] if index in kept else self._source(draw, index).tokens(int(draw.samples[index]))
        )

    def labels_of(self, draw: Draw) -> Labels | None:
        """The targets of a batch, likewise; None where every token is one, and their weights 1."""
        labels, kept = labels_of(draw, lambda index: self._source(draw, index)), self._labels
        if draw.part and not draw.part.counts:
            return without_targets(draw)
        if labels is None or draw is not self._draw:
            return labels
        return labels._replace(of=lambda index: kept[index] if index in kept else labels.of(index))

    def _read(self, draw: Draw, index: int) -> None:
        """Raises EvenloadError for a sequence that is not what it was when the data were opened."""
        source, sample = self._source(draw, index), int(draw.samples[index])
        self._tokens[index] = source.tokens(sample)
        if draw.targets is None:
            return
        self._labels[index] = labels_in(source, sample)
        counted, wanted = int((self._labels[index][1:] != IGNORE).sum()), int(draw.targets[index])
        if counted != wanted:
            detail = f"sample {sample} has {counted} targets, {wanted} before"
            do = "leave the data files alone while they are trained on"
            raise EvenloadError(f"{source.name} has changed since it was opened", detail, do)

    def _source(self, draw: Draw, index: int) -> Source:
        assert draw.tenants is not None
        return self.sources[int(draw.tenants[index])]


@dataclass(frozen=True)
class TenantJob(VerbJob):
    """What the loop of tenants works with on each rank."""

    samples: TenantSamples = field(default_factory=TenantSamples)

    @property
    def folder(self) -> Path:
        """The folder of the tenants' files."""
        return folder_of_tenants(self.recipe)

    @property
    def out(self) -> Path:
        """Where each tenant has a folder."""
        return out_of(self.recipe)

    @property
    def stays(self) -> bool:
        """Whether the job waits for later tenants when all are done."""
        return config_of(self.recipe).wait

    def tokens_of(self, draw: Draw) -> TokensOf:
        return self.samples.tokens_of(draw)

    def labels_of(self, draw: Draw) -> Labels | None:
        return self.samples.labels_of(draw)


@contextmanager
def open_trainer(
    recipe: Recipe, world: World, watchdog: Watchdog, *, needs_tenants: bool = True
) -> Iterator[TenantJob]:
    """Open the trainer on the ranks of a world. Collective."""
    ready = preflights(recipe, needs_tenants=needs_tenants, world_size=world.size)
    number = own_replica(world)
    own, replicas = ready[number], Replicas([one.chain for one in ready], number)
    with host_until_end(own.recipe, world, watchdog) as host:
        yield TenantJob(own.recipe, world, host, own.chain, watchdog, replicas=replicas)


def free_bytes(chain: PlanChain, longest: int) -> float:
    """What the memory of a device leaves for adapters with their gradients and moments; ``longest``: tokens of the
    longest sample, which make the largest micro-batch where no plugin caps it."""
    memory, caps = chain.context.costs.memory, chain.caps
    uncapped = replace(chain.limits, max_activation_bytes=math.inf)
    budget = activation_budget_bytes(chain.context.cluster, memory, uncapped)
    tokens = caps.max_tokens if caps.max_tokens < UNCAPPED else longest
    working = max(memory.working_bytes_per_token, memory.head_working_bytes_per_token)
    kept = memory.activation_bytes_per_token + memory.head_bytes_per_token
    passes = tokens * (kept * chain.context.layout.pp + working)
    return budget - min(passes, caps.max_activation_bytes)
