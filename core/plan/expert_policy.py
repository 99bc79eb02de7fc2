"""Where the experts of a step's layers may run: what a plan says before any router has chosen.

The counts of tokens are known only inside a layer. What is slow to decide stands here, as data of the plan: which
planner of layers reads the counts, how many copies a rank may have, and the copies that are there before the counts
are. What is fast, the share of each rank in each expert's tokens, is that planner's answer (`core.experts.quotas`).

Shape legend: R = ranks of an expert-parallel group, E = experts of a layer.
"""

from __future__ import annotations

from typing import NamedTuple

LayerCopies = tuple[tuple[int, ...], ...]
"""For each rank of a group the experts that it has a copy of, ascending; empty: no rank has any."""

AT_HOME = "static"
"""The planner of layers that moves nothing: each expert's tokens run where its parameters are."""


class ExpertPolicy(NamedTuple):
    """How experts are shared by the ranks of each expert-parallel group in every pass of a step.

    An expert's home is the rank that has its parameters: E/R neighbouring experts on each rank. A copy is its weights
    on another rank for one pass of one layer; the copy's gradient goes home.
    """

    planner: str = AT_HOME
    """Name of the planner of layers, registered by a plugin (`core.registry.layer_planner`)."""
    slots: int = 0
    """Most experts of a layer that a rank has copies of."""
    tolerance: float = 1.0
    """Tokens of the busiest rank over those of the mean rank that are even enough."""
    least_tokens: int = 0
    """Copies of a layer that together take fewer tokens off the busiest rank are not worth their weights' travel, nor
    is a copy that takes fewer where its rank has another one already."""
    node_ranks: int = 0
    """Neighbouring ranks of a group on one node; 0: all of them."""
    keep: bool = True
    """Copies stay until the backward of their pass; else they are fetched again for it."""
    copy_tokens: int = 0
    """Tokens that a rank exchanges with other nodes, out and back in both passes, while it receives one copy's weights
    and sends its gradient; 0: where tokens come from is not asked."""
    once_topk: int = 0
    """Experts of a token, where it goes once to each node that has any of them; 0: once to each expert."""
    copies: tuple[LayerCopies, ...] = ()
    """For each layer of the model the copies that are there before its router has chosen; empty: none in any."""

    def copies_of(self, layer: int) -> LayerCopies:
        """Copies that a layer of the whole model, counted from 0, has before its router has chosen."""
        return self.copies[layer] if self.copies else ()


EXPERTS_AT_HOME = ExpertPolicy()
