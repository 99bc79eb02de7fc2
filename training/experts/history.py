"""The loads of experts that a run's planner knows: they follow the measured steps (`core.experts.history`).

Every rank adds the same integers up, and so comes to the same numbers to the last bit, as their plans must. One plan is
always being made ahead, so that new loads shape the plan after next. A checkpoint holds the loads that the plan ahead
knows and the newest: a run that is resumed goes on as if it had not been interrupted, on any layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...core.experts.history import Loads
from ...core.planning.chain import PlanChain
from ...core.planning.planner import Planner
from ...integrations.host.trained import StepResult
from ...runtime.experts.history import learned
from ..job import logger


class LoadHistory:
    """The loads of experts of a run whose ``chain`` may need them; first nothing, or a checkpoint's `state`."""

    def __init__(self, chain: PlanChain, state: Mapping[str, Any] | None = None) -> None:
        self.on = chain.needs_loads
        self._experts = chain.context.experts
        self._ahead: Loads = ()
        self._newest: Loads = ()
        if self.on and state is not None:
            self._restore(state)

    def newest(self, chain: PlanChain) -> PlanChain:
        """The chain with the newest loads."""
        return chain.with_loads(self._newest) if self.on else chain

    def first(self, chain: PlanChain) -> PlanChain:
        """The chain with the loads that the first plan of this run knows."""
        return chain.with_loads(self._ahead) if self.on else chain

    def after(self, planner: Planner, result: StepResult) -> None:
        """Learn from a step. Collective."""
        if self.on:
            chain = learned(self.newest(planner.chain), result.expert_loads)
            self._newest = _loads_of(chain)
            planner.use(chain)

    def state(self, planner: Planner) -> dict[str, Any]:
        """What a checkpoint keeps of the loads, ready for JSON."""
        if not self.on:
            return {}
        return {"loads": {"ahead": _loads_of(planner.chain_of_next), "newest": self._newest}}

    def _restore(self, state: Mapping[str, Any]) -> None:
        try:
            self._ahead, self._newest = (self._read(state[name]) for name in ("ahead", "newest"))
        except (KeyError, TypeError, ValueError) as error:
            logger.info("loads of experts are learned anew: those of the checkpoint are of another model (%s)", error)
            self._ahead = self._newest = ()

    def _read(self, rows: Any) -> Loads:
        """Raises TypeError or ValueError for what are no loads of this model."""
        assert self._experts is not None
        loads = tuple(tuple(map(float, row)) for row in rows)
        sizes = [len(row) for row in loads]
        if loads and sizes != [self._experts.num_experts] * len(self._experts.layers):
            raise ValueError(f"experts by layer: {sizes}")
        if not all(math.isfinite(value) and value >= 0 for row in loads for value in row):
            raise ValueError("a load that is no number of tokens")
        return loads


def _loads_of(chain: PlanChain) -> Loads:
    assert chain.context.experts is not None
    return chain.context.experts.loads
