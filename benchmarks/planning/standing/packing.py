"""`plugins.packing` of evenload on whole samples, as a recipe asks for it."""

from __future__ import annotations

from functools import cache

from evenload.api import load_recipe
from evenload.core.plan.step_plan import Lengths
from evenload.core.planning.chain import PlanChain

NAME = "evenload packing"
SOURCE = "plugins/packing"


@cache
def chain_of(num_samples: int, num_ranks: int, cap: int) -> PlanChain:
    words = [f"parallel.dp={num_ranks}", f"train.global_batch_size={num_samples}", f"data.max_length={cap}"]
    words += [f"plugins.packing.max_tokens={cap}", "plugins.packing.slices=off", "costs=verl-7b"]
    recipe = load_recipe("gpu-node", words)
    return PlanChain.of_recipe(recipe, recipe.layout())


def plan(lengths: Lengths, num_ranks: int, cap: int) -> list[list[list[int]]]:
    packs: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for micro_batch in chain_of(len(lengths), num_ranks, cap).plan(lengths).micro_batches:
        for rank in micro_batch.ranks:
            packs[rank].append([piece.sequence for piece in micro_batch.slices])
    return packs
