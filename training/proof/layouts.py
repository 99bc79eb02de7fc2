"""Where a proof resumes: another layout of the same ranks."""

from __future__ import annotations

from contextlib import suppress

from ...core.errors import EvenloadError
from ...core.recipe.recipe import Recipe
from ...core.recipe.traits import trainer_called
from ..preflight import preflight, runnable


def other_layout(recipe: Recipe, world_size: int) -> Recipe | None:
    """The recipe on another layout of the same ranks, on which its checkpoints load too; None where there is none.

    Tensor parallelism stays, so that plain training rounds as before; checkpoints of some trainers load on the layout
    that wrote them, or on another number of ranks. Where planners of layers are on, ranks that share experts go on
    sharing them: else nothing of what they plan would be proved behind the resume.
    """
    p = recipe.parallel
    # A stage of another layout might have frozen parameters alone.
    if not trainer_called(recipe.trainer).reshards or world_size == p.tp * p.cp or recipe.train.freeze:
        return None
    stages, experts = 1 if p.pp > 1 else 2, 1 if p.ep > 1 else 2
    regroups = recipe.model.moe and not any(plugin.place == "layers" for plugin in recipe.enabled())
    tries = [(stages, experts), (p.pp, experts)] if regroups else []
    for pp, ep in (*tries, (stages, p.ep)):
        with suppress(EvenloadError):
            dp = world_size // (p.tp * p.cp * pp)
            other = recipe.changed({"parallel.pp": pp, "parallel.ep": ep, "parallel.dp": dp})
            (runnable if recipe.adapts else preflight)(other, world_size)
            return other
    return None
