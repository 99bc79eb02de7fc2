"""evenload's numbers in the trackers of a Trainer (``report_to``), next to its own of the same step.

They go to the callbacks of `transformers.integrations` alone: what the Trainer prints, its history and callbacks of the
script's own stay as they are.
"""

from __future__ import annotations

from typing import Any

from ..unmodified.planned_loop import LoopSession

_INTEGRATIONS = "transformers.integrations."


def follow(trainer: Any, loop: LoopSession) -> None:
    """Let a Trainer that has trackers give them, after the losses of a step, the numbers of its loop."""
    from transformers import TrainerCallback

    class _Numbers(TrainerCallback):  # type: ignore[misc]
        """The last callback of the Trainer."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            said = loop.numbers if logs and "loss" in logs else {}
            for tracker in _trackers(trainer) if said else ():
                tracker.on_log(args, state, control, logs=dict(said), **more)

    if _trackers(trainer):
        trainer.add_callback(_Numbers())


def _trackers(trainer: Any) -> list[Any]:
    return [one for one in trainer.callback_handler.callbacks if type(one).__module__.startswith(_INTEGRATIONS)]
