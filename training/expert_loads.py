"""What routers did in a step, gathered from all ranks: the metrics that are logged, and the file of ``log.loads``.

    {"format": 1, "experts": 8, "topk": 2, "layers": [0, 1], "ranks": 2, "ep": 2}
    {"step": 0, "counts": [round][layer][rank][expert]}
    ...

Counts are tokens that a rank of the plane has for an expert, padding and dummies left out; a round is the k-th pass of
each rank, in which ranks that share experts run together. A step that is cut short is the last line of a run that ended
while it was written.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import numpy as np

from ..core.aliases import Floats, Ints
from ..core.errors import shorten
from ..core.input.format import to_json
from ..core.planning.chain import PlanChain
from ..core.recipe.sizes import shape_of
from ..integrations.host.trained import StepResult
from ..runtime.experts.gate import Load
from ..runtime.world.agreement import everyone
from .files import refusing_unwritable
from .job import Job, logger


def metrics_of(result: StepResult) -> dict[str, float] | None:
    """What is logged of a step's experts (`metrics.StepRow.moe`); None where nothing was routed. Collective among hosts
    that book loads."""
    columns = ("imbalance", "imbalance_after", "copies", "copied_bytes", "exposed_s")
    rows = [[*(getattr(load, name) for name in columns), bool(load.failed)] for load in result.expert_loads]
    own = np.array(rows, dtype=np.float64)
    ranks = [rows for rows in everyone(own) if len(rows)]
    if not ranks:
        return None
    before, after, copies, copied_bytes, _, failed = np.concatenate(ranks).T
    return {
        **_spread("imbalance", before),
        **_spread("imbalance_after", after),
        "copies": float(copies.mean()),
        "copied_bytes": float(copied_bytes.sum()),
        "exposed_s": max(float(rows[:, 4].sum()) for rows in ranks),
        "failed_frac": float(failed.mean()),
    }


def imbalance_of(result: StepResult) -> float:
    """How much longer a step's experts take than with even routing: tokens of the busiest rank over those of the mean
    one as ranks computed them, on average over all layers, passes and groups by their tokens; 1 where nothing was
    routed. Collective."""
    own = np.array([[sum(load.counts), load.imbalance_after] for load in result.expert_loads], dtype=np.float64)
    rows = [rows for rows in everyone(own) if rows.any()]
    if not rows:
        return 1.0
    tokens, ratios = np.concatenate(rows).T
    return float(np.average(ratios, weights=tokens))


def _spread(name: str, ratios: Floats) -> dict[str, float]:
    p50, p95 = np.percentile(ratios, (50, 95)).tolist()
    return {f"{name}_p50": p50, f"{name}_p95": p95, f"{name}_max": float(ratios.max())}


def say_without_copies(chain: PlanChain, steps: Sequence[Mapping[str, float] | None]) -> None:
    """Warn of a run with planners of layers in whose steps (`metrics_of`) no expert had a copy, or that failed."""
    metrics = [step for step in steps if step is not None]
    if any(failed := [step["failed_frac"] for step in metrics]):
        text = "planners of layers failed in %.3g %% of all passes of layers, whose experts stayed at home: see above"
        logger.warning(text, 100 * sum(failed) / len(failed))
    if chain.of_layers and chain.context.layout.ep > 1 and metrics and not any(step["copies"] for step in metrics):
        names = ", ".join(f"plugins.{plugin.name}" for plugin, _ in chain.of_layers)
        logger.warning(
            "%s changed nothing: in %d steps no layer had a copy of an expert: loads were even or not yet known, or no "
            "copy was worth its weights' way; the busiest rank had %.3f times the mean rank's tokens (p95, last step)",
            names,
            len(metrics),
            metrics[-1]["imbalance_p95"],
        )


@contextmanager
def loads_writer(job: Job, *, goes_on: bool) -> Iterator[Callable[[int, StepResult], None]]:
    """Writes the router counts of a step to ``log.loads``, from all ranks on rank 0; the function is collective.

    ``goes_on``: a resumed run's lines follow those of the file. Raises EvenloadError where it cannot be opened.
    """
    path = job.recipe.log.loads
    if path is not None and not job.has_experts:
        logger.warning("log.loads has no effect: the model has no experts")
    if path is None or not job.has_experts:
        yield lambda step, result: None
        return
    file = _opened(path, goes_on) if job.is_rank0 else None
    try:
        yield _LoadsLog(job, file).write
    finally:
        if file is not None:
            with suppress(OSError):  # of a log that was given up, what was not written is tried again
                file.close()


class _LoadsLog:
    """Appends to a file, whose header it writes or, where it goes on with one, compares."""

    def __init__(self, job: Job, file: TextIO | None) -> None:
        self._job = job
        self._file = file
        self._headed = False

    def write(self, step: int, result: StepResult) -> None:
        """A disk that fails is no reason to end a training run: the log is given up then."""
        rows = everyone((self._job.host.dp_cp_rank, result.expert_loads))
        if self._file is None:
            return
        counts, layers = counts_of(rows, self._job.host.layout.dp_cp_size)
        try:
            if self._headed or self._begin(self._file, layers):
                self._file.write(to_json({"step": step, "counts": counts.tolist()}) + "\n")
                self._file.flush()
        except OSError as error:
            self._give_up(f"step {step} is not in it: {error}")

    def _begin(self, file: TextIO, layers: list[int]) -> bool:
        """Write the header, or compare that of the file; whether lines of this run may follow it."""
        layout, experts = self._job.host.layout, shape_of(self._job.recipe.model).experts
        assert experts is not None
        sizes = {"experts": experts.num_experts, "topk": experts.topk, "layers": layers}
        header = to_json({"format": 1, **sizes, "ranks": layout.dp_cp_size, "ep": layout.ep}) + "\n"
        file.seek(0)
        if not (first := file.readline(len(header) + 1)):
            file.write(first := header)
        self._headed = first == header
        if not self._headed:
            self._give_up(f"its file was begun by another model or layout, name another one: {shorten(first.strip())}")
        return self._headed

    def _give_up(self, why: str) -> None:
        logger.warning("log.loads is given up, training goes on: %s", why)
        self._file = None


def counts_of(rows: Sequence[tuple[int, Sequence[Load]]], num_ranks: int) -> tuple[Ints, list[int]]:
    """Tokens int64 [rounds, layers, ranks, experts] and the layers, from the loads of every (plane rank, stage)."""
    layers = sorted({load.layer for _, loads in rows for load in loads})
    places = {layer: place for place, layer in enumerate(layers)}
    entries: list[tuple[int, int, int, Load]] = []
    for rank, loads in rows:
        rounds = dict.fromkeys(layers, 0)
        for load in sorted(loads, key=lambda one: one.number):
            entries.append((rounds[load.layer], places[load.layer], rank, load))
            rounds[load.layer] += 1
    experts = max((len(load.counts) for *_, load in entries), default=0)
    most = max((place for place, *_ in entries), default=-1) + 1
    counts = np.zeros((most, len(layers), num_ranks, experts), dtype=np.int64)
    for place, layer, rank, load in entries:
        counts[place, layer, rank] = load.counts
    return counts, layers


def _opened(path: Path, goes_on: bool) -> TextIO:
    """For reading and appending; of a run that goes on what is whole, as the last line may be cut short."""
    with refusing_unwritable("log.loads", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if goes_on and path.is_file() and path.stat().st_size:
            with path.open("r+b") as file:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                    whole_bytes = text.rfind(b"\n") + 1
                file.truncate(whole_bytes)
        return path.open("a+" if goes_on else "w+")
