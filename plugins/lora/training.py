"""Train the adapters of many tenants on one base: what `train` does where the lora plugin is on."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...core.errors import EvenloadError
from ...core.machine.replicas import Roster
from ...core.recipe.recipe import Recipe
from ...runtime.watchdog.watchdog import Watchdog
from ...runtime.world.folder_lock import folder_lock
from ...runtime.world.replicas import JobGroup
from ...runtime.world.roster import membership, own_place
from ...runtime.world.world import World
from ...training.checkpoint.checkpoints import last_good
from ...training.early_end import listening
from ...training.eras import about, begins, in_eras, recipe_of
from ...training.garbage import collected
from ...training.job import in_world, logger
from ...training.progress import Progress
from ...training.replicas import Replicas
from ...training.run.writers import entry_of_end, writer
from .arrivals.job import TenantJob, TenantSamples, open_trainer
from .arrivals.preflight import out_of, preflights, refuse_of_models, say_without_effect
from .loop import TenantLoop
from .records import saving
from .records.rows import Live, totals, totals_of_replicas
from .records.saving import Saved


def train_tenants(recipe: Recipe, against: tuple[str, ...], progress: Progress) -> dict[str, Any] | None:
    """Train on this rank until all tenants have ended. Lists every tenant and every step."""
    refuse_of_models(recipe, against)

    def work(world: World, watchdog: Watchdog) -> dict[str, Any]:
        alone = membership() is None  # else whoever leads holds the folders
        with folder_lock(*(_folders(recipe) if alone else ())), open_trainer(recipe, world, watchdog) as job:
            if job.is_rank0:
                say_without_effect(recipe)
            job.say_stock("train")
            return _trained(job, recipe, progress)

    return in_world(recipe, work)


def _folders(recipe: Recipe) -> tuple[Path | None, ...]:
    return recipe.checkpoint.dir, out_of(recipe)


class TenantRun:
    """Steps of a job, by this replica with the others that are there (`training.eras`)."""

    def __init__(self, job: TenantJob, asked: Recipe, progress: Progress) -> None:
        self.job = job
        self._asked = asked
        self._progress = progress
        self.chains = dict(enumerate(job.replicas.chains))
        """Of all replicas that have taken part, by their numbers."""
        self._saved: Saved | None = None
        self.loop: TenantLoop | None = None

    def state(self) -> Saved | None:
        """What the job goes on with. Collective over the replica."""
        return self.loop.in_memory() if self.loop else self._saved

    def receive(self, across: JobGroup, source: int) -> None:
        """The state says all: adapters and their moments are in it."""

    def work(self, roster: Roster | None, state: Saved | None) -> TenantLoop:
        """All steps, from a state in memory or the checkpoint that is there. Collective."""
        if roster is not None:
            chains = [one.chain for one in preflights(recipe_of(self._asked, roster), needs_tenants=False)]
            self.chains |= dict(zip((one.number for one in roster.members), chains, strict=True))
            self.job = replace(self.job, replicas=Replicas(chains, own_place(roster)), samples=TenantSamples())
        job = self.job
        self._saved = state or saving.resume(job)
        self.loop = None
        for number in job.host.adapters.numbers:
            job.host.adapters.leave(number)
        first = self._saved.step if self._saved else 0
        begins(first)
        last_rows = state.in_memory.last_rows if state and state.in_memory else None
        with ExitStack() as opened:
            if roster is not None:
                opened.enter_context(folder_lock(*_folders(self._asked)))
            log = writer(job.recipe, is_rank0=job.is_rank0, first=first, again=last_rows[0] if last_rows else None)
            write = opened.enter_context(log)
            ending = opened.enter_context(listening(job.recipe))
            collect = opened.enter_context(collected(job.recipe.train.gc_every))
            self.loop = loop = TenantLoop(job, self._saved, write, Live(self._progress), ending, collect)
            loop.run()
            write(entry_of_end(loop.step, loop.ended_early or "done"))
        return loop


def _trained(job: TenantJob, asked: Recipe, progress: Progress) -> dict[str, Any]:
    run = TenantRun(job, asked, progress)
    if member := membership():
        member.arrive(about(asked))
    loop = in_eras(job.watchdog, run.work, run.state, run.receive)
    _refuse_nobody(loop)
    job, members, root = run.job, loop.members, job.recipe.checkpoint.dir
    checkpoint = last_good(root) if root else None
    return {
        "recipe": (asked if asked.parallel.replicas else job.recipe).model_dump(mode="json", exclude_defaults=True),
        "host": job.host.describe(),
        "summary": {**totals(loop.rows), "checkpoint": str(checkpoint) if checkpoint else None, "out": str(job.out)},
        "ended_early": loop.ended_early,
        "tenants": [*members.ended.values(), *(tenant.status() for tenant in members.tenants)],
        "refused": {name: str(error) for name, error in members.invalid_files.items()},
        "sweeps": list(loop.sweeps.rankings.values()),
        "replicas": totals_of_replicas(loop.rows, run.chains),
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
