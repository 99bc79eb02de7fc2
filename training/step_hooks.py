"""What is done around the steps of a run: before a batch is drawn, before its step is trained, and after it.

What a run learns from its steps (`learning`), its validation, and what plugins and other packages do (`core.run_hooks`)
have one form, `StepHook`. Their states are kept and restored here, and here a run says which of them start anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..core.aliases import Floats
from ..core.errors import EvenloadError
from ..core.planning.planner import Planned, Planner
from ..core.run_hooks import RUN_HOOKS
from .drawing import Drawing
from .job import Job, logger
from .metrics import MeasuredStep

_OTHER_KEYS = {"data", "loads", "order", "recipe", "refit", "step", "validation"}
"""Keys of a checkpoint's state that are not of run hooks."""


class RunContext(NamedTuple):
    """What run hooks are made for."""

    job: Job
    drawing: Drawing
    """Draws the batches of its steps."""


class PredictedStep(NamedTuple):
    """What the cost model says of a plan."""

    step_s: float
    compute_s: float
    """Passes alone."""
    busiest_s: float
    work: Floats | None
    """Columns for the fit, where there is one."""
    busy_s: Floats
    """Passes of every rank, [stages, plane ranks]."""


class TrainedStep(NamedTuple):
    """A step that has been trained."""

    number: int
    """Steps of the run before it."""
    planned: Planned
    taken: MeasuredStep
    predicted: PredictedStep | None
    """On the rank that reports."""


class StepHook:
    """What is done around the steps of a run. Subclasses override what they need; every rank calls every method at the
    same time, so each may be collective."""

    on = True
    """Whether there is anything for it to do; one that is off is left out."""
    key = ""
    """The name of its state in a checkpoint; empty: it has none there."""
    kept_with_draw = False
    """Its state is part of the batches' own (`Drawing.selected`), since they are drawn ahead; `state` is not asked."""
    anew = ""
    """What a run says whose checkpoint has no state that the hook can go on from, as "steps are counted anew"."""
    reference: Callable[[int], Floats] | None = None
    """``reference(sample)``: losses of its tokens [length] by another model, with which the losses of steps are
    compared; None: the hook needs no such comparison."""

    def before(self, planner: Planner) -> int:
        """Prepare the draw of the next batch; how many batches after it may be drawn while its step begins."""
        return sys.maxsize

    def planned(self, planned: Planned) -> Planned:
        """The step to train, drawn and planned."""
        return planned

    def after(self, planner: Planner, step: TrainedStep) -> None:
        """Learn from a step; ``planner`` plans the next ones."""

    def state(self, planner: Planner) -> Mapping[str, Any]:
        """What a checkpoint keeps under `key`, ready for JSON; whole on rank 0."""
        return {}

    def restore(self, saved: Any) -> None:
        """Go on from what a checkpoint has kept. Raises KeyError, TypeError or ValueError, and changes nothing, where
        that is the state of something else."""

    def report(self, train_s: float) -> dict[str, Any]:
        """What it came to, for the result of a run whose steps took ``train_s`` seconds."""
        return {}


def run_hooks(run: RunContext) -> list[StepHook]:
    """The hooks of all rows for a run. Collective. Raises EvenloadError."""
    RUN_HOOKS.load_entry_points()
    hooks: list[StepHook] = []
    keys = set(_OTHER_KEYS)
    for row in RUN_HOOKS.registered().values():
        for hook in RUN_HOOKS.imported(row)(run):
            if hook.key in keys:
                what = f"two parts of a checkpoint are called '{hook.key}'"
                raise EvenloadError(what, f"one is of the run hook '{row.name}'", "give its hook another key")
            keys |= {hook.key} - {""}
            hooks.append(hook)
    return hooks


class StepHooks:
    """Hooks that do their part one after the other."""

    def __init__(self, hooks: Iterable[StepHook]) -> None:
        self._hooks = tuple(hook for hook in hooks if hook.on)
        self.reference = next((hook.reference for hook in self._hooks if hook.reference), None)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a checkpoint; where it has none of a hook that fits, that is logged."""
        for hook in self._hooks:
            if hook.key:
                _restore(hook, state["order"] if hook.kept_with_draw else state)

    def warn_of_unread(self, state: Mapping[str, Any]) -> None:
        """Say in one warning what a checkpoint has of hooks that this run lacks: their policy or package is gone."""
        kept = {*state, *({"select"} & {*state["order"]})}
        if unread := sorted(kept - _OTHER_KEYS - {hook.key for hook in self._hooks}):
            text = "the checkpoint has the state of %s, which this run neither reads nor keeps"
            logger.warning(text, " and ".join(map(repr, unread)))

    def next(self, planner: Planner, ahead: int) -> Planned:
        """The next step to train; as many as ``ahead`` more may be begun with it. Collective."""
        planned = planner.next(ahead=min([ahead, *(hook.before(planner) for hook in self._hooks)]))
        for hook in self._hooks:
            planned = hook.planned(planned)
        return planned

    def after(self, planner: Planner, step: TrainedStep) -> None:
        """Learn from a step. Collective."""
        for hook in self._hooks:
            hook.after(planner, step)

    def state(self, planner: Planner) -> dict[str, Any]:
        """What a checkpoint keeps of all, by their keys."""
        return {hook.key: hook.state(planner) for hook in self._hooks if hook.key and not hook.kept_with_draw}

    def report(self, train_s: float) -> dict[str, Any]:
        """What all of them came to."""
        return {name: value for hook in self._hooks for name, value in hook.report(train_s).items()}


def _restore(hook: StepHook, states: Mapping[str, Any]) -> None:
    try:
        hook.restore(states[hook.key])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, EvenloadError):
            raise
        anew, text = hook.anew or f"{hook.key} starts anew", "%s: the checkpoint has nothing of it that fits (%s: %s)"
        logger.info(text, anew, type(error).__name__, error)
