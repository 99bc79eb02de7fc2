"""Where the rows of a run go: TensorBoard, Weights & Biases and a JSON Lines log, as the recipe names them."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import EvenloadError, shorten
from ...core.input.format import to_json
from ...core.planning.planner import Planned
from ...core.recipe.recipe import Recipe
from ..files import refusing_unwritable
from ..job import logger
from ..metrics import DomainLoss, StepRow
from ..replicas import whole_of
from ..validation.validation import Validated

_NO_SCALARS = ("step", "tokens", "targets", "moe", "domains", "replicas")
_WHERE_THERE_ARE = ("domains", "replicas")
"""What rows have of some runs alone."""
_IN_A_BOARD = {"shares": "share", "objective": "objective"}
"""What boards call a number of a domain that a policy has answered."""


_LOOKED_AT = 1 << 22
"""Bytes at the end of a log in which its last rows are looked for."""


class Entry(NamedTuple):
    """What logs get at once."""

    step: int
    scalars: Mapping[str, float]
    """What boards show, by name."""
    line: Mapping[str, Any]
    """The object of the JSON Lines log."""
    always: bool = False
    """Boards get it, whatever ``log.every`` is."""


Write = Callable[[Entry], None]


@contextmanager
def writer(recipe: Recipe, *, is_rank0: bool, first: int = 0, again: Entry | None = None) -> Iterator[Write]:
    """Writes entries to every log that the recipe names; on a rank that does not lead to none. ``first``: the step that
    the run begins or goes on with; ``again``: it goes on from memory, and this was to be
    told last, which a rank that is gone may not have done.

    A log that cannot be opened is refused; one that fails later (a full disk) is given up with a warning, since no log
    is worth a training run.
    """
    log = recipe.log
    with ExitStack() as open_logs:
        writers: dict[str, Write] = {}
        if is_rank0 and log.tensorboard:
            writers["log.tensorboard"] = open_logs.enter_context(_board(log.tensorboard, log.every))
        if is_rank0 and log.wandb:
            writers["log.wandb"] = open_logs.enter_context(_project(log.wandb, recipe))
        if is_rank0 and log.jsonl:
            writers["log.jsonl"] = open_logs.enter_context(
                _lines(log.jsonl, first, resumes=recipe.checkpoint.dir is not None, again=again)
            )

        def write(entry: Entry) -> None:
            for name, one in list(writers.items()):
                try:
                    one(entry)
                except Exception as error:  # these writers raise whatever their threads met
                    del writers[name]
                    logger.warning("%s is given up after step %d, training goes on: %s", name, entry.step, error)

        yield write


def entry_of_step(row: StepRow, planned: Planned, of_steps: int, ends: str) -> Entry:
    """What logs get of a step of a run of ``of_steps``; ``ends``: why there is none after it, where that is
    not the last one."""
    whole = {name: value for name, value in asdict(row).items() if name not in _WHERE_THERE_ARE or value}
    values = {name: value for name, value in whole.items() if name not in _NO_SCALARS}
    scalars = {"tokens_per_s": row.tokens / row.step_s, **values}
    scalars |= {f"moe/{name}": value for name, value in (row.moe or {}).items()}
    scalars |= _of_domains(row.domains)
    scalars |= {f"replicas/{one.replica}/busy_s": one.busy_s for one in row.replicas}
    order = planned.draw.state
    policy = (order.get("policy") or {}).items()
    share_record = {key: dict(zip(order["here"], values, strict=True)) for key, values in policy}
    for key, own in share_record.items():
        scalars |= {f"domains/{name}/{_IN_A_BOARD[key]}": value for name, value in own.items()}
    line = {**whole, **share_record, "planner": planned.plan.made_by, "of_steps": of_steps}
    line["ends"] = ends or ("done" if row.step + 1 == of_steps else None)
    line["samples"] = whole_of(planned.draw).samples.tolist()
    return Entry(row.step, {f"evenload/{name}": value for name, value in scalars.items()}, line)


def _of_domains(domains: Mapping[str, DomainLoss] | None) -> dict[str, float]:
    return {f"domains/{name}/{key}": own[key] for name, own in (domains or {}).items() for key in ("loss", "targets")}


def entry_of_end(step: int, ends: str) -> Entry:
    """What a log gets after the last step of tenants; ``ends``: why there is none after it."""
    return Entry(step, {}, {"ends": ends})


def entry_of_validation(row: Validated) -> Entry:
    """What logs get of a validation, at the number of the step that comes next."""
    scalars = {"loss": row.loss, "perplexity": row.perplexity, "tokens_per_s": row.tokens_per_s}
    scalars |= _of_domains(row.domains)
    scalars |= {f"generate/{name}": value for name, value in (row.generate or {}).items()}
    series = "sparse/" if row.sparse and not row.sparse.dense else ""
    named = {f"evenload/validation/{series}{name}": value for name, value in scalars.items()}
    whole = {name: value for name, value in asdict(row).items() if value is not None}
    return Entry(row.step, named, {"validation": whole}, always=True)


@contextmanager
def _board(folder: Path, every: int) -> Iterator[Write]:
    from torch.utils.tensorboard import SummaryWriter

    with refusing_unwritable("log.tensorboard", folder):
        board = SummaryWriter(str(folder))

    def write(entry: Entry) -> None:
        for name, value in entry.scalars.items() if entry.always or entry.step % every == 0 else ():
            board.add_scalar(name, value, entry.step)

    yield write
    with suppress(OSError):
        board.close()


@contextmanager
def _project(project: str, recipe: Recipe) -> Iterator[Write]:
    """A run of Weights & Biases, whose own variables (WANDB_MODE=offline, WANDB_DIR, ...) hold."""
    import wandb

    try:
        run = wandb.init(project=project, config=recipe.model_dump(mode="json", exclude_defaults=True))
    except Exception as error:  # of wandb's own kinds
        do = "log in with `wandb login`, set WANDB_MODE=offline, or leave log.wandb out"
        raise EvenloadError("log.wandb cannot be opened", shorten(f"{type(error).__name__}: {error}"), do) from error

    def write(entry: Entry) -> None:
        if entry.always or entry.step % recipe.log.every == 0:
            run.log(dict(entry.scalars), step=entry.step)

    with run:
        yield write


@contextmanager
def _lines(path: Path, first: int, *, resumes: bool, again: Entry | None) -> Iterator[Write]:
    """Rows that a killed run wrote after its last checkpoint are cut off; those of a run that ``resumes`` nothing and
    begins anew make place, and stay in ``PATH.before``."""
    with refusing_unwritable("log.jsonl", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if (again or resumes) and path.is_file() and path.stat().st_size:
            _cut(path, first) if first else os.replace(path, path.with_name(f"{path.name}.before"))
        # A pipe that nobody reads is refused, and not waited for.
        file = open(path, "a", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666))  # noqa: SIM115

    def write(entry: Entry) -> None:
        file.write(to_json(entry.line) + "\n")
        file.flush()

    if again and again.step not in _last_steps(path):
        write(again)
    yield write
    with suppress(OSError):
        file.close()


def _last_steps(path: Path) -> set[int]:
    """The steps that the end of a log has rows of."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOOKED_AT))
        lines = file.read().splitlines()
    steps = set()
    for line in lines:
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            row = json.loads(line)
            if "step_s" in row:
                steps.add(row["step"])
    return steps


def _cut(path: Path, first: int) -> None:
    """Cut off the last rows from one of step ``first`` or a later one on, and rows that are not whole."""
    with path.open("r+b") as file:
        kept = end = path.stat().st_size
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            while end:
                start = text.rfind(b"\n", 0, end - 1) + 1
                stays = _stays(text[start:end], first)
                if stays:
                    break
                kept, end = kept if stays is None else start, start
        file.truncate(kept)


def _stays(line: bytes, first: int) -> bool | None:
    """Whether a line is of a step before the ``first`` one, or of a validation up to there; None: it stays if the one
    before it does, as the evaluations of tenants after a step."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        row = json.loads(line)
        if "evaluation" in row and line.endswith(b"\n"):
            return None
        before = row["validation"]["step"] <= first if "validation" in row else row["step"] < first
        return bool(before) and line.endswith(b"\n")
    return False
