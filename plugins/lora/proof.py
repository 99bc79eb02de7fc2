"""Prove on the user's own recipe that every tenant trains in the shared plan as it does alone.

Some steps of the job that `train` would do - the same batches, plans, hooks, reduction and updates - are held, tenant
by tenant, against plain training of that tenant alone (`alone`). Adapters begin with matrices B that are not
zero, for a gradient of zero proves nothing. In every second step half of the tokens carry no loss, and one tenant has
no data: not a bit of it may change. In the middle the trainer is closed, and the adapters go on in another one, on
another layout where the ranks allow one. Dropout is off: plain training has none to compare with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...core.planning.planner import Draw
from ...core.recipe.adapter import Adapter, TenantTrain
from ...core.recipe.recipe import Recipe
from ...runtime.adapters.places import AdapterState, B
from ...runtime.watchdog.watchdog import Watchdog
from ...runtime.world.agreement import from_first
from ...runtime.world.world import World
from ...training.hosts import integration
from ...training.job import in_world
from ...training.progress import Progress
from ...training.proof.proven_steps import ProvenSteps, other_layout
from .arrivals.folder import Folder
from .arrivals.job import TenantJob, open_trainer
from .arrivals.opening import Entrant, open_tenant
from .arrivals.preflight import config_of, folder_of_tenants
from .proof_steps import ProofStep, TenantBeside, proven_step
from .state.drawing import next_of, union
from .tenant_file import Tenant, parse_tenant

BUILT_IN_RANKS = (4, 8, 16)
_SIZE_OF_B = 0.02


def verify_tenants(recipe: Recipe, steps: int, progress: Progress, *, weights: bool = False) -> dict[str, Any] | None:
    """Verify on this rank, over so many updates before and after the change of trainers; ``weights``: targets have
    drawn ones."""
    return in_world(recipe, _Proof(recipe, steps, progress, weights=weights).run)


class _Proof:
    """The tenants of a recipe, each against itself trained alone. Everything is collective."""

    def __init__(self, recipe: Recipe, steps: int, progress: Progress, *, weights: bool) -> None:
        self._recipe, self._steps = recipe, steps
        self._weights = weights
        self._tenants: list[TenantBeside] = []
        self._base: dict[str, Tensor] = {}
        self._proven = ProvenSteps(steps, progress)
        self._drawn = 0

    def run(self, world: World, watchdog: Watchdog) -> dict[str, Any]:
        before = (self._steps + 1) // 2
        with open_trainer(self._recipe, world, watchdog, needs_tenants=False) as job:
            self._tenants = [_beside(entrant, number, job) for number, entrant in enumerate(entrants_of(job.recipe))]
            self._base = {name: weight.clone() for name, weight in job.host.weights().items()}
            self._proven.begin(job.host, job.chain)
            self._take(job, range(before))
        if before < self._steps:
            recipe = other_layout(self._recipe, world.size) or self._recipe
            with open_trainer(recipe, world, watchdog, needs_tenants=False) as job:
                self._proven.resume(job.host, before)
                self._take(job, range(before, self._steps))
        return {**self._proven.summary(), "tenants": [one.row() for one in self._tenants]}

    def _take(self, job: TenantJob, numbers: range) -> None:
        """Steps in one trainer; the adapters come into it and go out again."""
        plain = integration(job.recipe.trainer).PlainModel(job.recipe, job.host)
        for one in self._tenants:
            one.alone.plain = plain
            job.samples.sources[one.number] = one.tenant.source
            job.host.adapters.join(one.number, one.alone.adapter, one.tenant.config.train, one.state)
        planner = job.planner(lambda: job.replicas.part_of(self._draw()))
        for number in numbers:
            step = ProofStep(job, number, planner.next(ahead=0), self._base, self._weights)
            self._proven.add(job.chain, step.planned.plan, proven_step(step, self._tenants))
        for one in self._tenants:
            one.state = job.host.adapters.state(one.number)
        plain.close()

    def _draw(self) -> Draw:
        """The batch of the next step: the tenants take turns to be left out of every second one."""
        number, every = self._drawn, self._tenants
        self._drawn += 1
        left_out = every[number // 2 % len(every)] if number % 2 and len(every) > 1 else None
        return union({one.number: next_of(one.tenant.drawing) for one in every if one is not left_out})


@contextmanager
def company(recipe: Recipe, world: World, watchdog: Watchdog) -> Iterator[tuple[TenantJob, list[TenantBeside]]]:
    """The trainer of a recipe with all of its tenants. Collective."""
    with open_trainer(recipe, world, watchdog, needs_tenants=False) as job:
        tenants = [_beside(entrant, number, job) for number, entrant in enumerate(entrants_of(job.recipe))]
        for one in tenants:
            job.host.adapters.join(one.number, one.alone.adapter, one.tenant.config.train, one.state)
        yield job, tenants


def entrants_of(recipe: Recipe) -> Sequence[Entrant]:
    """The tenants of the recipe's folder; where it names none, three on the recipe's own data. Collective. Raises
    EvenloadError for a file that describes none."""
    if config_of(recipe).tenants is None:
        return list(_built_in(recipe))
    files = from_first(lambda: Folder(folder_of_tenants(recipe)).look().came, "job")
    for file in files:
        if file.error is not None:
            raise file.error
    return [Entrant(file.name, file.name, parse_tenant(file.text, file.name), "") for file in files]


def _built_in(recipe: Recipe) -> Iterator[Entrant]:
    data = recipe.data.model_dump(mode="json", exclude={"domains", "mix", "validation"})
    size = max(1, (recipe.train.global_batch_size or len(BUILT_IN_RANKS)) // len(BUILT_IN_RANKS))
    for seed, rank in enumerate(BUILT_IN_RANKS):
        train = TenantTrain(batch_size=size, seed=seed, lr=1e-2, weight_decay=0.1, clip_grad=0.5)
        config = Tenant.model_validate({"data": data, "adapter": Adapter(r=rank), "train": train})
        yield Entrant(f"rank-{rank}", "", config, "")


def _beside(entrant: Entrant, number: int, job: TenantJob) -> TenantBeside:
    tenant, weights = open_tenant(entrant, number, job.recipe, job.replicas.chains)
    adapter, train = tenant.adapter.model_copy(update={"lora_dropout": 0.0}), tenant.config.train
    adapters = job.host.adapters
    adapters.join(number, adapter, train, AdapterState(weights, {}, {}, 0) if weights else None)
    start = dict(adapters.state(number).weights)
    adapters.leave(number)
    generator = torch.Generator().manual_seed(train.seed)
    for name in sorted(start):
        if name.endswith(B) and not start[name].any():
            drawn = torch.randn(start[name].shape, generator=generator, dtype=torch.float64)
            start[name] = (drawn * _SIZE_OF_B).to(start[name].dtype)
    return TenantBeside.of(tenant, copy.deepcopy(tenant.drawing), adapter, start, job)
