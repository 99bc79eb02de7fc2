"""The moe section of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ...core.input.bounds import AMOUNT, CountOrNone
from ...core.registry import PluginConfig


class MoeConfig(PluginConfig):
    """Which ranks of an expert-parallel group compute which tokens of each expert."""

    mode: Literal["auto", "clone", "reroute", "layout"] = "auto"
    """layout: copies chosen from the loads of earlier steps, tokens divided evenly over them. reroute: the same copies,
    tokens divided by exact counts. clone: copies chosen from exact counts, in every layer of every micro-batch. auto:
    clone, and no copies at all where by the costs none could pay for its weights."""
    slots: CountOrNone | None = None
    """Most experts of a layer that a rank has copies of; null: as many as it has of its own, which always suffices for
    clone, and between nodes as many more as memory has room for, where they keep tokens inside a node; but 2 at most
    for reroute and layout, whose copies travel whatever the counts are."""
    tolerance: float | None = Field(default=None, ge=1, le=AMOUNT)
    """Tokens of the busiest rank over those of the mean rank that are even enough, whatever the copies cost that this
    takes; above 1 it saves copies and their memory, but hardly time. null: exact loads where the costs say that copies
    pay, else none."""
    once_a_node: bool | None = None
    """A token goes once to each node where it has experts, and on from there; else once to each of its experts. null:
    whichever the costs say takes less. It has an effect where a group spans nodes, on Megatron-Core."""
    owners: Literal["home", "sharded"] = "home"
    """What a rank has between passes. home: its own experts, whole. sharded: a piece of every expert, with its gradient
    and optimizer state; each pass fetches all that it runs, so that one layout costs as much as another."""
