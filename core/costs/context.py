"""What a planner may know of its machine and model, and one direction of its passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..machine.cluster import Cluster
from ..machine.layout import Layout
from .costs import Costs, PassCost
from .traffic import NO_TRAFFIC, Traffic


@dataclass(frozen=True)
class PlanningContext:
    """What a plugin may know when it plans: costs and traffic of a stage, machines, layout. Never tokens or torch."""

    costs: Costs
    layout: Layout
    cluster: Cluster
    traffic: Traffic = NO_TRAFFIC
    head_frac: float = 0.0
    """Share of the linear work that is the output layer's: the last pipeline stage has it alone."""


class Direction(NamedTuple):
    """The passes of one direction at a stage, as far as communication goes."""

    cost: PassCost
    """What computing costs, which hides communication."""
    passes: int
    """1 where values move (forward), 2 where their gradients move as well (backward)."""
    stage: int = 0
