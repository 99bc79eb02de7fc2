"""Switching on, in code that we do not own: all that a recipe's trainer needs goes on together and comes off together.

    session = evenload.enable("recipe.yaml")        with evenload.enabled("recipe.yaml"):
    ...                                                 ...
    session.disable()

Rows of modules that are loaded go on at once, the others right after their import, so enabling may come first or last.
For Megatron-Core these are the CPU bridge (where there is no CUDA), mends of its faults, and, if the recipe enables a
plugin, the planned schedule; for DeepSpeed the rows of its engine. Where a verb has rows of its own (`evenload audit`),
these go on in place of all but the comparison of ranks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from ..api import load_plugins, load_recipe
from ..core.errors import EvenloadError
from ..core.recipe.carried import ROWS
from ..core.recipe.recipe import Recipe
from ..core.recipe.traits import trainer_called
from ..integrations.unmodified.planned_runs import release_loops
from .cpu_bridge import bridge_cpu
from .ledger import Ledger, Status
from .row import Patch

_lock = threading.Lock()
_session: Session | None = None


class Session:
    """What `enable` has switched on. As a context manager it switches it off at the end."""

    def __init__(self, recipe: Recipe, name: str, ledger: Ledger) -> None:
        self.recipe, self.name = recipe, name
        self._ledger = ledger

    @property
    def active(self) -> bool:
        """Whether this session is on."""
        return _session is self

    def table(self) -> tuple[Status, ...]:
        """What became of every patch row."""
        return self._ledger.table()

    def disable(self) -> None:
        """Put every symbol back, by identity; a second call does nothing.

        Raises:
            EvenloadError: somebody has changed a patched symbol since; nothing is switched off then.
        """
        global _session
        with _lock:
            if _session is self:
                self._ledger.undo()
                release_loops()
                _session = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()

    def __repr__(self) -> str:
        return f"<evenload session of {self.name}, {'on' if self.active else 'off'}>"


def enable(recipe: Recipe | str | Path) -> Session:
    """Switch a recipe's plugins on in this process.

    Raises:
        EvenloadError: another session is on; the recipe is wrong; the trainer is missing, of an unsupported version or
            changed. Nothing is switched on then.
    """
    global _session
    load_plugins()
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    plugins = ", ".join(plugin.name for plugin in chosen.enabled()) or "no plugin"
    source = "a recipe" if isinstance(recipe, Recipe) else str(recipe)
    name = f"{source} ({chosen.trainer}: {plugins})"
    with _lock:
        if _session is not None:
            raise EvenloadError(
                "evenload is switched on already", _session.name, "disable that session first; there is one at a time"
            )
        ledger = Ledger()
        try:
            _apply(chosen, ledger)
        except BaseException:
            ledger.undo()
            raise
        _session = Session(chosen, name, ledger)
        return _session


def disable() -> None:
    """Switch off what is on; nothing on is fine. Raises as `Session.disable`."""
    if _session is not None:
        _session.disable()


@contextmanager
def enabled(recipe: Recipe | str | Path) -> Iterator[Session]:
    """A recipe's plugins for the length of a block. Raises as `enable` and `Session.disable`."""
    with enable(recipe) as session:
        yield session


def _apply(recipe: Recipe, ledger: Ledger) -> None:
    trainer = trainer_called(recipe.trainer)
    if ROWS in os.environ:
        ledger.apply(_rows(("evenload.patches.ranks", os.environ[ROWS]), recipe), lazy=True)
        return
    if trainer.bridges_cpu:
        bridge_cpu(ledger, lazy=True)
    ledger.apply(_rows(trainer.mends, recipe), lazy=True)
    if trainer.patched_always or recipe.enabled():
        ledger.apply(_rows(trainer.patches, recipe), lazy=True)
        if "torch.distributed" in sys.modules:  # the group may be there already
            import_module("..integrations.unmodified.roll_call", __package__).leave_word(recipe)


def _rows(modules: Iterable[str], recipe: Recipe) -> list[Patch]:
    return [row for name in modules for row in import_module(name).rows(recipe)]
