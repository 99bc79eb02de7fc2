"""Which enabled plugins did something in the steps of a run (`Shown.by`), and whose planners failed in it.

A simpler plan that took over shows nothing of the planners of steps, nor any plan of a plugin that was left out of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from ..plan.branches import signs_of
from ..plan.step_plan import StepPlan
from ..registry import StepPlugin
from .chain import PlanChain
from .gains import own_step, refused_by
from .planner import FAILED_ON, FELL_BACK

logger = logging.getLogger("evenload")


def failure_of(plan: StepPlan) -> str:
    """Where and why the planners of a step failed, and what runs instead; empty where they did not."""
    note = next((note for note in plan.notes if note.startswith(FELL_BACK) and FAILED_ON in note), "")
    return note and f"planning {note.removeprefix(FELL_BACK)}; the simpler plan '{plan.made_by}' ran"


class Exercised:
    """The plugins of a run, as its steps show them."""

    def __init__(self) -> None:
        self.plugins: dict[str, str] = {}
        """What no step had of each plugin, in words; empty where one had it, or nothing is known of that."""
        self._steps = self._failed = 0
        self._noted: StepPlan | None = None

    @property
    def idle(self) -> dict[str, str]:
        """The plugins that no step has shown, with what they lacked."""
        return {name: lacking for name, lacking in self.plugins.items() if lacking}

    def note(
        self,
        chain: PlanChain,
        plan: StepPlan,
        taken: Collection[str] | None,
        micro_batch_size: int | None = None,
        packed: StepPlan | None = None,
    ) -> None:
        """Take down a step. ``taken``: its branches that the plan does not tell; None: unknown, so that nothing is said
        of planners of layers. ``micro_batch_size``, ``packed``: of the trainer's own step, as in `gains`."""
        self._steps, self._failed = self._steps + 1, self._failed + bool(failure_of(plan))
        if plan is self._noted and taken is None:
            return  # shows what it has shown before
        self._noted = plan
        plugins = [p for p, _ in (*chain.links, *chain.of_slices, *(chain.of_layers if taken is not None else ()))]
        words = {plugin.name: f"no {' or '.join(plugin.shown.by)}" if plugin.shown.by else "" for plugin in plugins}
        self.plugins = words | self.plugins
        if not self.idle:
            return
        signs = signs_of(plan, own_step(chain, plan, micro_batch_size, packed)).union(taken or ())
        fell_back = any(note.startswith(FELL_BACK) for note in plan.notes)
        for plugin in plugins:
            works = not (fell_back and isinstance(plugin, StepPlugin)) and not refused_by(plan, plugin.name)
            if works and not signs.isdisjoint(plugin.shown.by):
                self.plugins[plugin.name] = ""

    def say(self) -> None:
        """Warn, at the end of a run, of planners that failed in it and of plugins without effect."""
        if self._failed:
            text = "planning failed in %d of %d steps, and a simpler plan ran in each of them: see the warnings above"
            logger.warning(text, self._failed, self._steps)
        for name, lacking in self.idle.items():
            logger.warning("plugins.%s did not run: %s in %d steps", name, lacking, self._steps)
