"""What is recorded of every step, where it is written, and what a run comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.jsontext import to_json
from ..core.planner import Planned
from ..core.recipe import Recipe
from ..integrations.host import StepResult

Floats = npt.NDArray[np.float64]
Write = Callable[["Row", Planned], None]


@dataclass(frozen=True)
class Row:
    """Measures of one step; seconds are wall time on the slowest rank."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_s: float
    plan_s: float
    plan_wait_s: float
    imbalance: float
    """Busiest data-parallel rank over mean, measured."""
    padding_frac: float
    bound_s: float
    """Certified lower bound on the busiest rank's time, predicted; 0 where the planner gives none."""
    delay_steps: float = 0.0
    """Steps by which this step's tokens were held back, in the mean."""
    waiting: int = 0
    """Samples that wait for a later step."""
    predicted_s: float = 0.0
    """What the simulator gives for ``step_s``, planning left out; from the costs that the plan was made with."""
    bubble_frac: float = 0.0
    """Idle share of the step: 1 - busy / step, mean over stages and plane ranks. Passes alone are busy."""
    bubble_worst: float = 0.0
    """Of the stage and rank that idles most."""


@dataclass(frozen=True)
class Taken:
    """One step as the ranks measured it; arrays are [stages, plane ranks], means over tensor-parallel peers."""

    result: StepResult
    """This rank's."""
    step_s: float
    """Of the slowest rank, waiting for the plan included."""
    plan_s: float
    wait_s: float
    """For the plan."""
    busy_s: Floats
    forward_s: Floats


class Idle:
    """The idle share of every rank: 1 - busy / step over the steps after the first, which pays for warming up."""

    def __init__(self) -> None:
        self._busy_s: Floats | None = None
        self._step_s = 0.0
        self._count = 0

    def add(self, taken: Taken) -> None:
        """Count a step; the second replaces the first."""
        self._count += 1
        fresh = self._busy_s is None or self._count == 2
        self._busy_s = taken.busy_s if fresh or self._busy_s is None else self._busy_s + taken.busy_s
        self._step_s = taken.step_s if fresh else self._step_s + taken.step_s

    def shares(self) -> list[list[float]]:
        """[stages][plane ranks]; empty before the first step."""
        shares: list[list[float]] = [] if self._busy_s is None else (1 - self._busy_s / self._step_s).tolist()
        return shares


def summary(rows: list[Row], warmup: int = 1) -> dict[str, Any]:
    """Totals over the steps after the first, which pays for warming up; delay over all of them."""
    timed = rows[warmup:] or rows
    if not timed:
        empty = {"tokens_per_s": 0.0, "imbalance": 1.0, "padding_frac": 0.0, "loss": None, "plan_share": 0.0}
        timing = {"step_s": 0.0, "predicted_s": 0.0, "bubble_frac": 0.0, "bubble_worst": 0.0}
        return {**empty, **timing, "delay_steps": 0.0, "waiting": 0}
    seconds = sum(row.step_s for row in timed)
    return {
        "tokens_per_s": sum(row.tokens for row in timed) / seconds,
        "imbalance": float(np.mean([row.imbalance for row in timed])),
        "padding_frac": float(np.mean([row.padding_frac for row in timed])),
        "plan_share": sum(row.plan_wait_s for row in timed) / seconds,
        "step_s": seconds / len(timed),
        "predicted_s": float(np.mean([row.predicted_s for row in timed])),
        "bubble_frac": sum(row.bubble_frac * row.step_s for row in timed) / seconds,
        "bubble_worst": sum(row.bubble_worst * row.step_s for row in timed) / seconds,
        "loss": rows[-1].loss,
        "delay_steps": float(np.average([row.delay_steps for row in rows], weights=[row.tokens for row in rows])),
        "waiting": rows[-1].waiting,
    }


@contextmanager
def writer(recipe: Recipe | None) -> Iterator[Write]:
    """Writes rows to TensorBoard under ``evenload/`` and to the JSON Lines log, where the recipe names them."""
    if recipe is None:
        yield lambda row, planned: None
        return
    board = None
    if recipe.log.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(recipe.log.tensorboard))
    lines = _open_log(recipe.log.jsonl)

    def write(row: Row, planned: Planned) -> None:
        values = asdict(row)
        if board is not None and row.step % recipe.log.every == 0:
            board.add_scalar("evenload/tokens_per_s", row.tokens / row.step_s, row.step)
            for name, value in values.items():
                if name not in ("step", "tokens"):
                    board.add_scalar(f"evenload/{name}", value, row.step)
        if lines is not None:
            samples = planned.draw.samples.tolist()
            lines.write(to_json({**values, "planner": planned.plan.made_by, "samples": samples}) + "\n")
            lines.flush()

    try:
        yield write
    finally:
        if board is not None:
            board.close()
        if lines is not None:
            lines.close()


def _open_log(path: Path | None) -> Any:
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a")
