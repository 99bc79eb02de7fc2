"""What the host's verbs ask where adapters of tenants are trained (`training.adapting.AdapterTraining`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import EvenloadError, refuse_first, shorten
from ...core.input import reading
from ...core.machine.replicas import refuse_other_size
from ...core.recipe.recipe import Recipe
from ...training.adapting import PlannedTenants, ProfiledBase, ProvenTenant
from ...training.progress import Progress
from .arrivals import preflight as preflights

if TYPE_CHECKING:
    from ...runtime.watchdog.watchdog import Watchdog
    from ...runtime.world.world import World
    from ...training.job import VerbJob


def preflight(recipe: Recipe, num_ranks: int | None, against: tuple[str, ...], *, proof: bool) -> int:
    if (sizes := recipe.ranks_of_replicas) and num_ranks is not None:
        refuse_other_size(sizes, num_ranks)
    ready = preflights.preflights(recipe, num_ranks, against, needs_tenants=not proof)
    return sum(one.chain.context.layout.world_size for one in ready)


def train(recipe: Recipe, against: tuple[str, ...], progress: Progress) -> dict[str, Any] | None:
    from .training import train_tenants

    return train_tenants(recipe, against, progress)


def verify(recipe: Recipe, steps: int, progress: Progress, *, weights: bool) -> dict[str, Any] | None:
    from .proof import verify_tenants

    return verify_tenants(recipe, steps, progress, weights=weights)


@contextmanager
def company(recipe: Recipe, world: World, watchdog: Watchdog) -> Iterator[tuple[VerbJob, list[ProvenTenant]]]:
    from .proof import company

    with company(recipe, world, watchdog) as (job, tenants):
        yield job, [ProvenTenant(one.tenant.name, one.number, one.tenant.source, one.alone) for one in tenants]


def tenants(recipe: Recipe, lengths: Any) -> PlannedTenants:
    from .shared_plan import SharedPlan

    return SharedPlan(recipe, lengths)


def profiling() -> ProfiledBase:
    from . import profiling

    return profiling


def adapter_of(recipe: Recipe, name: str) -> Path:
    """NAME below ``plugins.lora.out`` (``NAME/best``), or the last adapter in it. Raises EvenloadError."""
    from ...integrations.huggingface.folders.adapters import ADAPTER_MODEL
    from .records.output import LAST

    out, parts = preflights.out_of(recipe), Path(name).parts
    what, do = "a tenant's name leads out of plugins.lora.out", "give the name of a folder below it"
    refuse_first((Path(name).is_absolute() or ".." in parts, what, shorten(name), do))
    for folder in (out / name, out / name / LAST):
        if reading.is_file(folder / ADAPTER_MODEL):
            return folder
    detail = f"no {ADAPTER_MODEL} in {shorten(str(out / name))} or its {LAST}"
    raise EvenloadError(f"there is no adapter of tenant {shorten(name)}", detail, "name a tenant that has trained")
