"""Plans, costs and machines of small whole numbers, for tests that count by hand, and the chains of small recipes."""

from __future__ import annotations

from typing import Any

from evenload.core.costs.costs import Costs, PassCost
from evenload.core.laws import check
from evenload.core.machine.cluster import Cluster, Link
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse

LINK = Link(latency_s=0.0, bytes_per_s=1.0)
NODES_OF_4 = Cluster(
    name="plain",
    source="one byte a second inside a node of 4 ranks, half as fast across",
    ranks_per_node=4,
    flops_per_s=1.0,
    memory_bytes=1e9,
    intra=LINK,
    inter=Link(latency_s=0.0, bytes_per_s=0.5),
)
ONE = Costs(
    source="one second forward, two backward, per token", forward=PassCost(token_s=1.0), backward=PassCost(token_s=2.0)
)


def nodes(ranks_per_node: int = 8, link: Link = LINK, **more: float) -> Cluster:
    """Nodes that are linked as their ranks are."""
    sizes = {"flops_per_s": 1.0, "memory_bytes": 1e9, **more}
    return Cluster(name="a", source="a", ranks_per_node=ranks_per_node, intra=link, inter=link, **sizes)


def ops(text: str) -> tuple[Op, ...]:
    """``F0 F1 B1 B0`` as an order."""
    return tuple(Op(word[0], int(word[1:])) for word in text.split())  # type: ignore[arg-type]


def alone(lengths: list[int] | tuple[int, ...], ranks: tuple[int, ...] | int = 0) -> tuple[MicroBatch, ...]:
    """A micro-batch for each length, whole, on one rank of its own or all on the same."""
    of = [ranks] * len(lengths) if isinstance(ranks, int) else ranks
    return tuple(MicroBatch((Slice(i, 0, n),), (rank,)) for i, (n, rank) in enumerate(zip(lengths, of, strict=True)))


def plan(lengths: list[int], ranks: list[tuple[int, ...]], limits: Limits) -> StepPlan:
    """A micro-batch for each length, whole, on the ranks that share it; in the trainer's own schedule."""
    batches = tuple(MicroBatch((Slice(i, 0, n),), r) for i, (n, r) in enumerate(zip(lengths, ranks, strict=True)))
    return check(StepPlan(as_lengths(lengths), batches, limits))


def chain_of(plugins: dict[str, dict[str, Any]], ranks: int | None = None, **sections: Any) -> PlanChain:
    """The chain of a recipe that enables these plugins, each with its keys."""
    enabled = {name: {"enabled": True, **keys} for name, keys in plugins.items()}
    recipe = parse({**sections, "plugins": enabled})
    return PlanChain.of_recipe(recipe, recipe.layout(ranks))
