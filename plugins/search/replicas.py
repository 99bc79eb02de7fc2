"""Replicas of unlike shapes in place of the best setting's one: what they would take of the same batch, predicted.

For adapters of tenants alone, which are what replicas train (`parallel.replicas`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from ...core.balance.deployment import AS_FAST, ReplicaKind, deploy
from ...core.errors import EvenloadError
from ...core.plan.step_plan import Lengths
from ...core.planning.chain import PlanChain
from ...core.planning.replicas import ReplicaCost
from ...core.recipe.recipe import Recipe
from .space import Known


def deployed(
    recipe: Recipe, num_ranks: int, lengths: Lengths, known: Known, one_shape_s: float
) -> dict[str, Any] | None:
    """The replicas that end a batch first, under the recipe's other settings; None where no shape can be planned.

    Args:
        known: as in `space.space_of`.
        one_shape_s: what the recipe's own layout takes.
    """
    shapes = list(_shapes(recipe, num_ranks, lengths, known))
    try:
        deployment = deploy([kind for _, kind in shapes], [num_ranks])
    except EvenloadError:
        return None
    counts, step_s = deployment.counts.tolist(), deployment.dealt.step_s
    return {
        "predicted": True,
        "replicas": [{**own, "dp": count} for (own, _), count in zip(shapes, counts, strict=True) if count],
        "step_s": step_s,
        "one_shape_s": one_shape_s,
        "faster": step_s * (1 + AS_FAST) < one_shape_s,
        "floor_s": deployment.floor_s,
    }


def _shapes(
    recipe: Recipe, num_ranks: int, lengths: Lengths, known: Known
) -> Iterator[tuple[dict[str, Any], ReplicaKind]]:
    """Every shape of a replica that can run and is on the axes of a search, and what sequences take on it."""
    degrees, longest = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0], int(lengths.max())
    for tp, pp in ((tp, pp) for tp in degrees for pp in degrees if num_ranks % (tp * pp) == 0):
        layers = {"layers": "auto"} if recipe.model.num_layers % pp else {}
        with suppress(EvenloadError):
            own = recipe.changed({"parallel": {"tp": tp, "pp": pp, "dp": 1, **layers}})
            cost = ReplicaCost.of_chain(known(own, PlanChain.of_recipe(own, own.layout(tp * pp))), longest)
            kind = ReplicaKind(f"tp{tp} pp{pp}", tp * pp, cost.seconds(np.asarray(lengths)), cost.fixed_s)
            yield {"tp": tp, "pp": pp, **layers}, kind
