"""One rank of a job: join the world, bridge the CPU, watch over the work, open the trainer."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.aliases import Floats
from ..core.machine.replicas import Roster
from ..core.planning.chain import PlanChain
from ..core.planning.planner import Draw, Planner
from ..core.planning.turns import fingerprint
from ..core.policies import KINDS
from ..core.recipe.recipe import Recipe
from ..core.recipe.sizes import shape_of
from ..core.recipe.traits import trainer_called
from ..data.sources import Source
from ..integrations.host.host import Host
from ..patches import bridge_cpu
from ..runtime.adapters.company import Company
from ..runtime.attention.labels import Labels, TargetWeights
from ..runtime.attention.pack import TokensOf
from ..runtime.files import quiet_when_full
from ..runtime.watchdog.watchdog import Watchdog, working
from ..runtime.world.agreement import agree, everyone, gather_bytes
from ..runtime.world.folder_lock import folder_lock
from ..runtime.world.node_board import open_board
from ..runtime.world.roster import membership, own_place, own_replica, take_part
from ..runtime.world.variables import MEETING_PLACE, RESULT
from ..runtime.world.world import World, close_world, init_world
from .drawing import Domains, Drawing, drawing_of
from .hosts import integration
from .preflight import chains_of, preflights
from .replicas import Replicas, company_of, whole_of, without_targets

logger = logging.getLogger("evenload")

MOST_AHEAD = 8
"""Steps ahead that plans are begun where the recipe does not say it."""


@dataclass(frozen=True)
class VerbJob(ABC):
    """What a verb's loop works with on each rank, whoever owns the samples."""

    recipe: Recipe
    world: World
    host: Host
    chain: PlanChain
    watchdog: Watchdog
    replicas: Replicas = field(default_factory=lambda: Replicas(()), kw_only=True)
    """Of the job, each with planners of its own."""

    @property
    def has_experts(self) -> bool:
        """Whether layers of the model have experts."""
        return shape_of(self.recipe.model).experts is not None

    @property
    def is_rank0(self) -> bool:
        """Whether this is the rank that reports."""
        return self.world.leads

    def gather(self, *values: float) -> npt.NDArray[np.float64]:
        """Every rank's values, float64 [world, len(values)]. Collective."""
        rows = gather_bytes(struct.pack(f"{len(values)}d", *values))
        return np.array([struct.unpack(f"{len(values)}d", row) for row in rows])

    @cached_property
    def _places(self) -> npt.NDArray[np.int64]:
        """(pipeline stage, plane rank) of every rank, int64 [world, 2]. Collective where it is first asked for."""
        return self.gather(self.host.pipeline_stage, self.host.dp_cp_rank).astype(np.int64)

    def of_stages(self, per_rank: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Means over tensor-parallel peers. [world, ...] -> [stages, plane, ...]."""
        layout = self.host.layout
        out = np.zeros((layout.pp, layout.dp_cp_size, *per_rank.shape[1:]))
        np.add.at(out, tuple(self._places.T), per_rank)
        return out / layout.tp

    def of_ranks(self, per_stage: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """What each rank has of values of its stage and plane rank. [stages, plane, ...] -> [world, ...]."""
        stages, plane_ranks = self._places.T
        return np.array([per_stage[place] for place in zip(stages, plane_ranks, strict=True)])

    def most_of_stages(self, per_rank: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The largest value of each pipeline stage. [world] -> [stages]."""
        out = np.zeros(self.host.layout.pp)
        np.maximum.at(out, self._places[:, 0], per_rank)
        return out

    def planner(
        self, drawing: Callable[[], Draw], chain: PlanChain | None = None, first: PlanChain | None = None
    ) -> Planner:
        """A planner over the batches of a drawing; ``first`` plans the first of them. Collective."""
        config, chain = self.recipe.planner, chain or self.chain
        budget_s = config.budget_ms and config.budget_ms / 1e3
        asked = any(map(self.recipe.data_policy, KINDS))
        learns = config.refit or chain.layers.need_loads or asked
        turns, steps_ahead = None, 1
        # All replicas draw at once, one batch ahead: what is dealt is what all of them know.
        if config.background and not learns and not self.recipe.adapts and len(self.replicas.chains) <= 1:
            turns = open_board() if chain.staged else None
            steps_ahead = config.steps_ahead or min(MOST_AHEAD, turns.size if turns else 2)
        if turns:  # who does not plan a step itself would not notice another recipe
            agree(fingerprint(chain), "recipes", 0)
        return Planner(
            chain,
            drawing,
            budget_s=budget_s,
            background=config.background,
            exchange=gather_bytes,
            first=first,
            steps_ahead=steps_ahead,
            turns=turns,
        )

    def say_stock(self, verb: str) -> None:
        """Warn where no plugin is switched on, so that evenload does what the trainer does by itself."""
        if not self.chain.links and not self.chain.of_layers:
            logger.warning("no plugin is switched on: %s runs the trainer's own plan, stock, as evenload's too", verb)

    def company_of(self, draw: Draw) -> Company | None:
        """What all replicas train in the step of a draw that is one's part; None: it is all there is."""
        return company_of(draw, self.labels_of(whole_of(draw))) if draw.part else None

    @abstractmethod
    def tokens_of(self, draw: Draw) -> TokensOf:
        """Reads one sequence of a batch; ranks call it for what they compute and nothing else."""

    @abstractmethod
    def labels_of(self, draw: Draw) -> Labels | None:
        """The targets of a batch, read as `tokens_of` reads; None where every token is one."""


@dataclass(frozen=True)
class Job(VerbJob):
    """What the verbs train, verify, bench and profile work with, on each rank."""

    source: Source
    held_out: Source | None = None
    """What `train` validates on."""
    reference: Callable[[int], Floats] | None = None
    """``reference(sample)``: losses of its tokens by another model, with which those of steps are compared."""

    @cached_property
    def domains(self) -> Domains | None:
        """What the batches are a mixture of; None: the samples of one source."""
        return Domains.of_source(self.recipe, self.source)

    def drawing(self, state: Mapping[str, Any] | None = None) -> Drawing:
        """The global batches from the first step on, or from where a checkpoint's state was taken."""
        chain = next(iter(self.replicas.chains), self.chain)  # by it all replicas hold back the same samples
        drawing = drawing_of(self.recipe, self.source, chain, state)
        if drawing.num_ranks not in (None, chain.limits.num_ranks):
            logger.info("outliers are held back as for the %d ranks that the run began with", drawing.num_ranks)
        return drawing

    def say_unused(self, verb: str) -> None:
        """Warn, on the rank that reports, of settings that train alone heeds, and of a recipe without plugins."""
        self.say_stock(verb)
        log = self.recipe.log
        for name in ("trace", "jsonl", "tensorboard", "wandb"):
            if getattr(log, name) is not None:
                logger.warning("log.%s has no effect in %s: train alone writes it", name, verb)
        if self.held_out is not None:
            logger.warning("data.validation has no effect in %s: train alone evaluates", verb)
        if self.recipe.train.max_minutes is not None:
            logger.warning("train.max_minutes has no effect in %s: train alone ends early", verb)
        if self.recipe.train.gc_every is not None:
            logger.warning("train.gc_every has no effect in %s: train alone collects garbage at once", verb)
        if self.recipe.train.export is not None:
            logger.warning("train.export has no effect in %s: train alone writes a folder at its end", verb)
        if self.recipe.sparse.is_on:
            logger.warning("sparse has no effect in %s: train and score alone leave blocks of keys out", verb)
        for kind in KINDS:
            if kind != "mix" and self.recipe.data_policy(kind):
                logger.warning("the %s policy has no effect in %s: train alone scores samples", kind, verb)

    def dealt(self, drawing: Callable[[], Draw]) -> Callable[[], Draw]:
        """Gives what this replica trains of each batch."""
        return lambda: self.replicas.part_of(drawing())

    def tokens_of(self, draw: Draw) -> TokensOf:
        return lambda index: self.source.tokens(int(draw.samples[index]))

    def labels_of(self, draw: Draw) -> Labels | None:
        if draw.part and not draw.part.counts:
            return without_targets(draw)
        labels, reference = labels_of(draw, lambda index: self.source), self.reference
        if reference is None:
            return labels
        labels = labels or Labels(lambda index: self.source.labels(int(draw.samples[index])), draw.num_targets)
        return labels._replace(reference=lambda index: reference(int(draw.samples[index])))


def labels_of(draw: Draw, source_of: Callable[[int], Source]) -> Labels | None:
    """The targets of a batch, and their weights; None where every token is a target of weight 1.

    ``source_of``: where the sample of a sequence is read, by its place in the batch.
    """
    sums, samples = draw.weight_sums, draw.samples.tolist()
    if draw.targets is None and sums is None:
        return None
    labels = Labels(lambda index: source_of(index).labels(samples[index]), draw.num_targets)
    if sums is None:
        return labels
    factors = np.broadcast_to(draw.weight, len(samples))
    weights = TargetWeights(lambda index: factors[index] * source_of(index).weights(samples[index]), sums, draw.divisor)
    return labels._replace(weights=weights)


def open_host(recipe: Recipe, world: World) -> Host:
    """The trainer, its model built and sharded. Collective."""
    with working("building the model"):
        if recipe.model.weights is not None:  # replicas and shards of one model come from every host's own files
            from ..integrations.huggingface.folders.reading import WeightFolder  # safetensors is an extra

            agree(WeightFolder.open(recipe.model.weights).fingerprint(), "weights in model.weights", 0, "job")
        return integration(recipe.trainer).open_host(recipe, world)  # type: ignore[no-any-return]


@contextmanager
def host_until_end(recipe: Recipe, world: World, watchdog: Watchdog) -> Iterator[Host]:
    """The trainer, which is closed when all ranks are done with it. Collective."""
    host = open_host(recipe, world)
    logger.info("%s", json.dumps(host.describe()))
    yield host
    watchdog.at("end", waits=True)
    host.close()


@contextmanager
def open_world(recipe: Recipe) -> Iterator[tuple[World, Watchdog]]:
    """Join the world, with the watchdog over all that follows. Collective."""
    # Trainers warn at import about options nobody chose here; what concerns a run is said by the integrations.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|deepspeed)\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch\.distributed)\.")
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    bridge = bridge_cpu() if trainer_called(recipe.trainer).bridges_cpu else None
    safety = recipe.safety
    comes_and_goes = MEETING_PLACE in os.environ
    sizes = () if comes_and_goes else recipe.ranks_of_replicas
    world = init_world(safety.collective_timeout_s, safety.gone_s, sizes)
    with quiet_when_full(), Watchdog(gone_s=safety.gone_s, stuck_s=safety.stuck_s) as watchdog:
        if comes_and_goes:
            waits = partial(watchdog.at, "waiting for other replicas", waits=True)
            shapes = [one.model_dump(mode="json", exclude_none=True) for one in recipe.parallel.replicas or ()]
            take_part(shapes, safety.collective_timeout_s, waits)
        logger.setLevel(logging.INFO if world.leads else logging.ERROR)
        yield world, watchdog
        everyone(None, "job")  # until here all are watched; what follows waits for nobody that might be gone
    close_world(world)
    if bridge is not None:
        bridge.undo()


@contextmanager
def open_trainer(recipe: Recipe, world: World, watchdog: Watchdog, *, deals: bool = False) -> Iterator[Job]:
    """Open the trainer on the ranks of a world; another one may follow when it is closed. ``deals``: whoever works with
    it lets replicas have their parts (`Job.dealt`); else they are refused. Collective."""
    if not deals:
        recipe.refuse_replicas()
    with watchdog.working("opening the data"):
        every = preflights(recipe, world.size)
        number = own_replica(world)
        ready = every[number]
        for source in filter(None, (ready.source, ready.held_out)):  # plans agree where lengths do
            digest = hashlib.blake2b(source.fingerprint.encode(), digest_size=16).digest()
            agree(digest, f"samples of {source.name}", 0, "job")
        replicas = Replicas([one.chain for one in every], number)
        if len(every) > 1 and membership() is None:
            replicas.prepare(int(ready.source.lengths.max()))
    with host_until_end(ready.recipe, world, watchdog) as host:
        yield Job(ready.recipe, world, host, ready.chain, watchdog, ready.source, ready.held_out, replicas=replicas)


def with_members(job: Job, asked: Recipe, roster: Roster) -> Job:
    """The job with those replicas that take part; ``asked``: the recipe of all."""
    members = [dict(one.shape) for one in roster.members]
    recipe = asked.changed({"parallel.replicas": members, "model": job.recipe.model.model_dump(mode="json")})
    return replace(job, replicas=Replicas(chains_of(recipe, job.source), own_place(roster)))


def run_rank(
    recipe: Recipe, work: Callable[[Job], dict[str, Any]], writes: Path | None = None, *, deals: bool = False
) -> dict[str, Any] | None:
    """Do a verb's work with a trainer on this rank, which alone ``writes`` into a folder; see `in_world` and, for
    ``deals``, `open_trainer`."""

    def with_trainer(world: World, watchdog: Watchdog) -> dict[str, Any]:
        # Where replicas come and go, whoever leads holds it from roster to roster.
        with folder_lock(None if membership() else writes), open_trainer(recipe, world, watchdog, deals=deals) as job:
            return work(job)

    return in_world(recipe, with_trainer)


def in_world(recipe: Recipe, work: Callable[[World, Watchdog], dict[str, Any]]) -> dict[str, Any] | None:
    """Do a verb's work on this rank; rank 0 hands the result to the launcher, or returns it under torchrun."""
    with open_world(recipe) as (world, watchdog):
        result = work(world, watchdog)
        if member := membership():
            member.leave(json.dumps(result) if world.leads else None)
    if member or not world.leads:
        return None
    if path := os.environ.get(RESULT):
        Path(path).write_text(json.dumps(result))
        return None
    return result
