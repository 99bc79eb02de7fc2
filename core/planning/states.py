"""Bytes a weight has beside activations: itself, its gradient, the optimizer's states, and what sharding divides.

    trainer     precision  weight  gradient  master  Adam   divided over data-parallel ranks
    megatron    fp32       4       4         -       8      Adam, with the distributed optimizer
                bf16       2       4         4       8      master and Adam, likewise
                fp64       8       8         -       16     nothing
    deepspeed   fp32 / 0   4       4 late    -       8      nothing
                fp32 / 1,2 4       4 late    4       8      master and Adam
                fp32 / 3   4       4         4       8      all
                bf16 / 0   2       2 late    4       8      nothing
                bf16 / 1,2 2       2 late    4       8      master and Adam
                bf16 / 3   2       2         4       8      all

Rows of deepspeed are by ZeRO stage; "late" gradients are made in a step's first backward and freed with the update, the
others are there throughout. Read off megatron-core 0.16.1 and DeepSpeed 0.19 as evenload sets them up, by the bytes
alive after a step on one rank.
"""

from __future__ import annotations

from typing import NamedTuple

from ..recipe.recipe import Recipe

VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}


class States(NamedTuple):
    """Bytes of one weight, on one rank that shares it with nobody."""

    fixed: int
    """Between steps."""
    sharded: int
    """The part of ``fixed`` that data-parallel ranks divide between them."""
    late: int
    """Of the gradient, where it is made in a step's first backward."""
    gathered: int = 0
    """Of the whole weight beside the rank's part of it, where weights are divided and gathered for the passes."""


LIVE_WEIGHTS = 1_000_000_000
"""ZeRO 3 lets go of gathered weights only beyond so many (DeepSpeed's stage3_max_live_parameters)."""


def states_of(recipe: Recipe) -> States:
    """What the recipe's trainer, precision and sharding hold for a weight."""
    dtype, value = recipe.train.dtype, VALUE_BYTES[recipe.train.dtype]
    adam = 2 * max(4, value)
    if recipe.trainer == "megatron":
        master = 4 if dtype == "bf16" else 0
        shards = recipe.megatron.distributed_optimizer and dtype != "fp64"
        return States(value + max(4, value) + master + adam, master + adam if shards else 0, 0)
    stage = recipe.deepspeed.zero_stage
    if stage == 3:
        everything = value + value + 4 + adam
        return States(everything, everything, 0, gathered=value)
    master = 4 if dtype == "bf16" or stage else 0
    return States(value + master + adam, master + adam if stage else 0, value)
