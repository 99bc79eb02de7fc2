"""What planners must know of Megatron-Core. Imports neither it nor torch.

    precision  weight  gradient  master  Adam   divided over data-parallel ranks
    fp32       4       4         -       8      Adam, with the distributed optimizer
    bf16       2       4         4       8      master and Adam, likewise
    fp64       8       8         -       16     nothing

Gradients are there throughout, and are summed in float32 where weights are half precision. Read off megatron-core
0.16.1 as evenload sets it up, by the bytes alive after a step on one rank.
"""

from __future__ import annotations

from ...core.recipe.recipe import Recipe
from ...core.recipe.sizes import VALUE_BYTES
from ...core.recipe.traits import States, Trainer, TrainerTraits


def traits(recipe: Recipe) -> TrainerTraits:
    dtype, section = recipe.train.dtype, recipe.megatron
    value = VALUE_BYTES[dtype]
    gradient = max(4, value)
    optimizer = 2 * gradient + (4 if dtype == "bf16" else 0)
    shards = section.distributed_optimizer and dtype != "fp64"
    return TrainerTraits(
        states=States(value + gradient + optimizer, optimizer if shards else 0),
        sharding="optimizer" if section.distributed_optimizer else "none",
        summed_bytes=gradient,
        overlaps_gradients=section.overlap_grad_reduce,
        waits_for_sends=True,
    )


MEGATRON = Trainer(traits)
