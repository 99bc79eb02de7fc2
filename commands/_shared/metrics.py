"""What is recorded of every step, where it is written, and what a run comes to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.aliases import Floats
from ...core.errors import EvenloadError
from ...core.input.json_text import to_json
from ...core.planning.planner import Planned
from ...core.recipe.recipe import Recipe
from ...core.recipe.sections import Log
from ...core.simulate.step import Span
from ...integrations.host import StepResult

Write = Callable[["Row", Planned], None]

logger = logging.getLogger("evenload")


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
    moe: dict[str, float] | None = None
    """Of a model with experts: tokens of the busiest rank of a group over those of its mean rank, with every expert at
    its home, over all layers and passes (imbalance_p50, imbalance_p95, imbalance_max), and as the ranks computed them
    (imbalance_after_*); copies of experts in a layer's pass, in the mean; copied_bytes, weights that all ranks took in
    for them; exposed_s, for which the rank that waits longest waits for these."""


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
    moe: dict[str, float] | None = None
    """`Row.moe`."""
    spans: Sequence[Span] = ()
    """What all ranks did when (`StepResult.spans`), of tensor-parallel peers the first; empty unless recorded."""


def summary(rows: list[Row]) -> dict[str, Any]:
    """Totals over the steps after the first, which pays for warming up; delay over all of them."""
    timed = rows[1:] or rows
    if not timed:
        empty = {"tokens_per_s": 0.0, "imbalance": 1.0, "padding_frac": 0.0, "loss": None, "plan_share": 0.0}
        timing = dict.fromkeys(("step_s", "predicted_s", "bubble_frac", "bubble_worst", "delay_steps"), 0.0)
        return {**empty, **timing, "waiting": 0}
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
    """Writes rows to TensorBoard under ``evenload/`` and to the JSON Lines log, where the recipe names them.

    A log that cannot be opened is refused; one that fails later (a full disk) is given up with a warning, since no log
    is worth a training run.
    """
    log = recipe.log if recipe is not None else Log()
    with ExitStack() as open_logs:
        writers: dict[str, Write] = {}
        if log.tensorboard:
            writers["log.tensorboard"] = open_logs.enter_context(_board(log.tensorboard, log.every))
        if log.jsonl:
            writers["log.jsonl"] = open_logs.enter_context(_lines(log.jsonl))

        def write(row: Row, planned: Planned) -> None:
            for name, one in list(writers.items()):
                try:
                    one(row, planned)
                except Exception as error:  # TensorBoard's writer raises whatever its thread met
                    del writers[name]
                    logger.warning("%s is given up after step %d, training goes on: %s", name, row.step, error)

        yield write


@contextmanager
def _board(folder: Path, every: int) -> Iterator[Write]:
    from torch.utils.tensorboard import SummaryWriter

    with _refusing("log.tensorboard", folder):
        board = SummaryWriter(str(folder))

    def write(row: Row, _: Planned) -> None:
        if row.step % every:
            return
        board.add_scalar("evenload/tokens_per_s", row.tokens / row.step_s, row.step)
        scalars = {name: value for name, value in asdict(row).items() if name not in ("step", "tokens", "moe")}
        scalars |= {f"moe/{name}": value for name, value in (row.moe or {}).items()}
        for name, value in scalars.items():
            board.add_scalar(f"evenload/{name}", value, row.step)

    yield write
    with suppress(OSError):
        board.close()


@contextmanager
def _lines(path: Path) -> Iterator[Write]:
    with _refusing("log.jsonl", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")

    def write(row: Row, planned: Planned) -> None:
        samples = planned.draw.samples.tolist()
        file.write(to_json({**asdict(row), "planner": planned.plan.made_by, "samples": samples}) + "\n")
        file.flush()

    yield write
    with suppress(OSError):
        file.close()


@contextmanager
def _refusing(name: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        do = "give a path that can be written"
        raise EvenloadError(f"{name} cannot be written", f"{path}: {error.strerror}", do) from error
