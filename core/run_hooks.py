"""Makers of the hooks of a run (`training.step_hooks`), a row each.

The function of a row is called on every rank with a `training.step_hooks.RunContext`, when the trainer, the data and
the checkpoint are there. It gives the hooks that the recipe asks for, none where it asks for none.
"""

from __future__ import annotations

from dataclasses import dataclass

from .function_rows import FunctionRow, FunctionRows


@dataclass(frozen=True)
class RunHook(FunctionRow):
    """A maker of hooks; they do their part in the order of their rows."""

    refuses: str = ""
    """``module:function``: raises EvenloadError, before any rank starts, for a recipe and a source of samples on which
    the hooks cannot work; empty: they work on all."""


RUN_HOOKS = FunctionRows("run hook", RunHook)
