"""evenload's numbers in the trackers of a Trainer (``report_to``), beside its own of the same step.

They go to the callbacks of `transformers.integrations` alone: what the Trainer prints, its history and callbacks of the
script's own stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_INTEGRATIONS = "transformers.integrations."


def tell_trackers(trainer: Any, numbers: Mapping[str, float]) -> None:
    """Hand numbers, by name, to every tracker; each writes where it writes at all, which is on one rank."""
    for callback in trainer.callback_handler.callbacks if numbers else ():
        if type(callback).__module__.startswith(_INTEGRATIONS):
            callback.on_log(trainer.args, trainer.state, trainer.control, logs=dict(numbers), model=trainer.model)
