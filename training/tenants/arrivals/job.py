"""One rank of a job of tenants: the trainer with its frozen base, and nobody's data until a tenant joins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ....core.planning.chain import PlanChain
from ....core.planning.planner import Draw
from ....core.recipe.recipe import Recipe
from ....integrations.host.host import Host
from ....runtime.attention.labels import Labels
from ....runtime.attention.pack import TokensOf
from ....runtime.watchdog.watchdog import Watchdog
from ....runtime.world.world import World
from ...job import VerbJob, logger, open_host
from .preflight import config_of, folder_of_tenants, out_of, preflight
from .reading import TenantSamples


@dataclass(frozen=True)
class TenantJob(VerbJob):
    """What the loop of tenants works with on each rank."""

    recipe: Recipe
    world: World
    host: Host
    chain: PlanChain
    watchdog: Watchdog
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
    ready = preflight(recipe, world.size, needs_tenants=needs_tenants)
    host = open_host(ready.recipe, world)
    logger.info("%s", json.dumps(host.describe()))
    yield TenantJob(ready.recipe, world, host, ready.chain, watchdog)
    watchdog.at("end", waits=True)
    host.close()
