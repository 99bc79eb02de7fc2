"""Everything that can be found wrong before any rank starts or anything is written."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import numpy as np

from ...core.errors import EvenloadError, refuse_first
from ...core.input.bounds import refuse_endless
from ...core.plan.step_plan import as_lengths
from ...core.planning.chain import PlanChain
from ...core.recipe.recipe import Recipe
from ...core.recipe.rules import refuse_idle_ranks
from ...core.recipe.traits import trainer_called
from ...data.sources import Source, open_source
from ..pictures import refuse
from .hosts import require_own_loop

_VOCABULARY_MULTIPLE = 128
"""The same model for every power of two of tensor parallelism, so that a run can go on with another one."""


class Preflight(NamedTuple):
    """A recipe that can run: its data, and its chain of planners for the layout."""

    recipe: Recipe
    """With the vocabulary size filled in."""
    source: Source
    chain: PlanChain


def preflight(recipe: Recipe, world_size: int | None = None) -> Preflight:
    """Check trainer, layout, data and caps. Raises EvenloadError; starts nothing and writes nothing but data caches."""
    require_own_loop(recipe.trainer)
    refuse_first(*trainer_called(recipe.trainer).run_rules(recipe))
    if recipe.log.trace is not None and os.environ.get("RANK", "0") == "0":  # the rank that writes it
        refuse(trace=recipe.log.trace)
    layout = recipe.layout(world_size)
    refuse_idle_ranks(recipe.train.global_batch_size, layout.dp)
    if layout.cp > 1:
        do = "set parallel.cp=1, and let plugins.mesh put long sequences on several ranks"
        raise EvenloadError("static context parallelism can be planned, not run", f"parallel.cp {layout.cp}", do)
    source = open_source(recipe.data.source, **recipe.data.model_dump(exclude={"source"}))
    if len(source.lengths) < recipe.train.global_batch_size:
        detail = f"{len(source.lengths)} samples, train.global_batch_size {recipe.train.global_batch_size}"
        do = "lower train.global_batch_size, or data.max_length so that long samples are split"
        raise EvenloadError("the data holds fewer samples than one global batch", detail, do)
    recipe = with_vocabulary(recipe, source)
    chain = PlanChain.of_recipe(recipe, layout)
    # The longest samples of all: if these can be planned, no later batch has one that cannot.
    longest = np.sort(source.lengths)[-layout.dp_cp_size :]
    refuse_endless(longest, chain.largest_slice)
    chain.plan(as_lengths(longest))
    return Preflight(recipe, source, chain)


def with_vocabulary(recipe: Recipe, source: Source) -> Recipe:
    """The recipe with ``model.vocab_size``: the data's, rounded up so that every tensor-parallel rank has a share."""
    vocab_size, tp = recipe.model.vocab_size, recipe.parallel.tp
    if vocab_size is None:
        multiple = math.lcm(_VOCABULARY_MULTIPLE, tp)
        return recipe.changed({"model.vocab_size": -(-source.vocab_size // multiple) * multiple})
    if vocab_size < source.vocab_size:
        detail = f"model.vocab_size {vocab_size}, token ids up to {source.vocab_size - 1}"
        do = "raise model.vocab_size or leave it null"
        raise EvenloadError("the model's vocabulary is smaller than the data's", detail, do)
    if vocab_size % tp:
        do = "leave model.vocab_size null: it is then rounded up"
        raise EvenloadError("parallel.tp does not divide model.vocab_size", f"tp {tp}, vocabulary {vocab_size}", do)
    return recipe
