"""What routers did in a step, gathered from all ranks: the metrics that are logged, and the file of ``log.loads``.

    {"format": 1, "experts": 8, "topk": 2, "layers": [0, 1], "ranks": 2, "ep": 2}
    {"step": 0, "counts": [round][layer][rank][expert]}
    ...

Counts are tokens that a rank of the plane has for an expert, padding and dummies left out; a round is the k-th pass of
each rank, in which ranks that share experts run together. A step that is cut short is the last line of a run that ended
while it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.errors import EvenloadError
from ...core.input.json_text import to_json
from ...core.recipe.sizes import shape_of
from ...integrations.host import StepResult
from ...runtime.experts.gate import Load
from ...runtime.world.agreement import everyone
from .job import Job, logger


def metrics_of(result: StepResult) -> dict[str, float] | None:
    """What is logged of a step's experts (`metrics.Row.moe`); None where nothing was routed. Collective among hosts
    that book loads."""
    columns = ("imbalance", "imbalance_after", "copies", "copied_bytes", "exposed_s")
    own = np.array([[getattr(load, name) for name in columns] for load in result.expert_loads], dtype=np.float64)
    ranks = [rows for rows in everyone(own) if len(rows)]
    if not ranks:
        return None
    before, after, copies, copied_bytes, _ = np.concatenate(ranks).T
    return {
        **_spread("imbalance", before),
        **_spread("imbalance_after", after),
        "copies": float(copies.mean()),
        "copied_bytes": float(copied_bytes.sum()),
        "exposed_s": max(float(rows[:, -1].sum()) for rows in ranks),
    }


def _spread(name: str, ratios: Floats) -> dict[str, float]:
    p50, p95 = np.percentile(ratios, (50, 95)).tolist()
    return {f"{name}_p50": p50, f"{name}_p95": p95, f"{name}_max": float(ratios.max())}


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
    with ExitStack() as opened:
        file = opened.enter_context(_opened(path, goes_on)) if job.leads else None
        log = _LoadsLog(job, file, headed=goes_on)
        yield log.write


class _LoadsLog:
    def __init__(self, job: Job, file: TextIO | None, *, headed: bool) -> None:
        self._job, self._file, self._headed = job, file, headed

    def write(self, step: int, result: StepResult) -> None:
        """A disk that fails is no reason to end a training run: the log is given up then."""
        rows = everyone((self._job.host.dp_cp_rank, result.expert_loads))
        if self._file is None:
            return
        layout, shape = self._job.host.layout, shape_of(self._job.recipe.model)
        assert shape.experts is not None
        counts, layers = counts_of(rows, layout.dp_cp_size)
        lines: list[dict[str, Any]] = [{"step": step, "counts": counts.tolist()}]
        if not self._headed:
            sizes = {"experts": shape.experts.num_experts, "topk": shape.experts.topk, "layers": layers}
            lines.insert(0, {"format": 1, **sizes, "ranks": layout.dp_cp_size, "ep": layout.ep})
            self._headed = True
        try:
            self._file.write("".join(to_json(line) + "\n" for line in lines))
            self._file.flush()
        except OSError as error:
            logger.warning("log.loads is given up after step %d, training goes on: %s", step, error)
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a" if goes_on else "w")
    except OSError as error:
        do = "give a path that can be written"
        raise EvenloadError("log.loads cannot be written", f"{path}: {error.strerror}", do) from error
