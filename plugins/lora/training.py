"""Train the adapters of many tenants on one base: what `train` does where the lora plugin is on."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from ...core.errors import EvenloadError
from ...core.recipe.recipe import Recipe
from ...runtime.watchdog.watchdog import Watchdog
from ...runtime.world.folder_lock import folder_lock
from ...runtime.world.world import World
from ...training.checkpoint.checkpoints import last_good
from ...training.early_end import listening
from ...training.garbage import collected
from ...training.job import in_world, logger
from ...training.progress import Progress
from ...training.run.writers import entry_of_end, writer
from .arrivals.job import TenantJob, open_trainer
from .arrivals.preflight import out_of, refuse_of_models, say_without_effect
from .loop import TenantLoop
from .records import saving
from .records.rows import Live, totals, totals_of_replicas


def train_tenants(recipe: Recipe, against: tuple[str, ...], progress: Progress) -> dict[str, Any] | None:
    """Train on this rank until all tenants have ended. Lists every tenant and every step."""
    refuse_of_models(recipe, against)

    def work(world: World, watchdog: Watchdog) -> dict[str, Any]:
        with folder_lock(recipe.checkpoint.dir, out_of(recipe)), open_trainer(recipe, world, watchdog) as job:
            if job.is_rank0:
                say_without_effect(recipe)
            job.say_stock("train")
            return _trained(job, recipe, progress)

    return in_world(recipe, work)


def _trained(job: TenantJob, asked: Recipe, progress: Progress) -> dict[str, Any]:
    saved = saving.resume(job)
    first = saved.step if saved else 0
    with ExitStack() as opened:
        write = opened.enter_context(writer(job.recipe, is_rank0=job.is_rank0, first=first))
        ending = opened.enter_context(listening(job.recipe))
        collect = opened.enter_context(collected(job.recipe.train.gc_every))
        loop = TenantLoop(job, saved, write, Live(progress), ending, collect)
        loop.run()
        write(entry_of_end(loop.step, loop.ended_early or "done"))
    _refuse_nobody(loop)
    members, root = loop.members, job.recipe.checkpoint.dir
    checkpoint = last_good(root) if root else None
    return {
        "recipe": (asked if asked.parallel.replicas else job.recipe).model_dump(mode="json", exclude_defaults=True),
        "host": job.host.describe(),
        "summary": {**totals(loop.rows), "checkpoint": str(checkpoint) if checkpoint else None, "out": str(job.out)},
        "ended_early": loop.ended_early,
        "tenants": [*members.ended.values(), *(tenant.status() for tenant in members.tenants)],
        "refused": {name: str(error) for name, error in members.invalid_files.items()},
        "sweeps": list(loop.sweeps.rankings.values()),
        "replicas": totals_of_replicas(loop.rows, job.replicas.chains),
        "steps": [asdict(row) for row in loop.rows],
    }


def _refuse_nobody(loop: TenantLoop) -> None:
    """Raise EvenloadError where every file is wrong, so that nobody was trained."""
    members = loop.members
    if members.tenants or members.ended:
        return
    name, error = next(iter(members.invalid_files.items()), ("", None))
    if error is not None:
        what = f"no tenant can be trained; the first one, {name}: {error.what}"
        raise EvenloadError(what, error.found, error.do)
    logger.info("no tenant has come")
