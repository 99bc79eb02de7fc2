"""evenload's numbers in the trackers of a Trainer (``report_to``), beside its own of the same step.

They go to the callbacks of `transformers.integrations` alone: what the Trainer prints, its history and callbacks of the
script's own stay as they are.
"""

from __future__ import annotations

from typing import Any

from ..unmodified.planned_loop import PlannedLoop

_INTEGRATIONS = "transformers.integrations."


def tell_trackers(trainer: Any, planning: PlannedLoop) -> None:
    """Hand the numbers of the last step to every tracker; each writes where it writes at all, which is on one rank."""
    trackers = [one for one in trainer.callback_handler.callbacks if type(one).__module__.startswith(_INTEGRATIONS)]
    numbers = planning.numbers if trackers else {}
    for tracker in trackers if numbers else ():
        tracker.on_log(trainer.args, trainer.state, trainer.control, logs=dict(numbers), model=trainer.model)
