"""Everything that can be found wrong before any rank starts or anything is written."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..core.cascade import functions_of, warn_of_rescore
from ..core.errors import EvenloadError, Rule, refuse_first, shorten
from ..core.input import reading
from ..core.input.bounds import refuse_endless
from ..core.input.user_function import user_function
from ..core.machine.layout import Layout
from ..core.machine.replicas import refuse_other_size
from ..core.plan.step_plan import as_lengths
from ..core.planning.chain import PlanChain
from ..core.planning.forward_only import forward_only
from ..core.planning.planner import Draw
from ..core.recipe.generated import ScoredSamples
from ..core.recipe.pretrained import folder_of
from ..core.recipe.recipe import Recipe
from ..core.recipe.rules import refuse_idle_ranks
from ..core.recipe.sections import Data
from ..core.recipe.traits import trainer_called
from ..core.run_hooks import RUN_HOOKS
from ..data.mixed import MixedSource, naming_domain
from ..data.samples.whole_groups import WholeGroups
from ..data.sources import Source, open_source
from ..data.tokenizers import holds_tokenizer, open_tokenizer
from .drawing import Domains, batch_size, drawing_of, draws_of, refuse_short_data, scorable, with_layers
from .files import refuse_pictures
from .hosts import require_for_folders, require_own_loop
from .sampling.prompted import prompted

logger = logging.getLogger("evenload")

_VOCABULARY_MULTIPLE = 128
"""The same model for every power of two of tensor parallelism, so that a run can go on with another one."""


class Preflight(NamedTuple):
    """A recipe that can run: its data, and its chain of planners for the layout."""

    recipe: Recipe
    """With the vocabulary size filled in."""
    source: Source
    chain: PlanChain
    held_out: Source | None = None
    """What `train` validates on."""


def preflight(recipe: Recipe, world_size: int | None = None) -> Preflight:
    """As `preflights`, of a recipe without replicas."""
    (ready,) = preflights(recipe, world_size)
    return ready


def preflights(recipe: Recipe, world_size: int | None = None) -> list[Preflight]:
    """Check trainer, layout, data and caps of each replica, or of the one that a recipe is without any. Raises
    EvenloadError; starts nothing and writes nothing but data caches.

    ``world_size``: of a job of one replica; others say theirs."""
    several = bool(recipe.parallel.replicas)
    runnables, layouts = zip(
        *(runnable(one, None if several else world_size) for one in recipe.of_replicas), strict=True
    )
    if several and recipe.model.weights is not None:
        recipe = recipe.changed({"model.weights": str(runnables[0].model.weights)})
    elif not several:
        (recipe,) = runnables
        refuse_idle_ranks(recipe.train, layouts[0].dp)
    source, weights, validation = open_data(recipe), recipe.model.weights, recipe.data.validation
    scored = recipe.data.model_copy(update={"group": None, "weight_column": None, "weight_divisor": None})
    held_out = open_all(scored, validation.source, validation.domains, weights) if validation else None
    more = ", or data.max_length so that long samples are split"
    refuse_short_data(recipe, source.lengths, "the data holds fewer {} than one global batch", more)
    recipe = with_vocabulary(recipe, source, *([held_out] if held_out else []))
    recipe = with_steps(recipe, source)
    refuse_other_tokenizer(recipe)
    Domains.of_source(recipe, source)
    for row in RUN_HOOKS.registered().values():
        if row.refuses:
            RUN_HOOKS.imported(row, row.refuses)(recipe.of_replicas[0], source)
    every = [_of_replica(*both, source, held_out) for both in zip(recipe.of_replicas, layouts, strict=True)]
    refuse_longest(source, *(one.chain for one in every))
    if held_out is not None:
        refuse_unscored(recipe, held_out, draws_of(held_out, recipe))
        refuse_longest(held_out, *(forward_only(one.chain) for one in every))
    if validation and validation.generate:
        refuse_unsampled(recipe, validation.generate)
    return every


def chains_of(recipe: Recipe, source: Source) -> list[PlanChain]:
    """The planners of each replica of a recipe that `preflights` has completed."""
    return [_of_replica(one, one.layout(), source, None).chain for one in recipe.of_replicas]


def num_ranks_of(recipe: Recipe, asked: int | None, against: tuple[str, ...] = ()) -> int:
    """How many ranks a recipe needs that can run on its data, with these baselines. Raises EvenloadError."""
    sizes = recipe.ranks_of_replicas
    if sizes and asked is not None:
        refuse_other_size(sizes, asked)
    what, do = "baselines do not train next to replicas", "leave --against out"
    refuse_first((bool(sizes and against), what, f"--against {','.join(against)}, {len(sizes)} replicas", do))
    chains = [one.chain for one in preflights(recipe, asked)]
    for name in against:
        chains[0].rivals.offer(name)
    return sum(chain.context.layout.world_size for chain in chains)


def _of_replica(recipe: Recipe, layout: Layout, source: Source, held_out: Source | None) -> Preflight:
    recipe = with_layers(recipe, layout.world_size, partial(drawing_of, recipe, source))
    return Preflight(recipe, source, PlanChain.of_recipe(recipe, recipe.layout(layout.world_size)), held_out)


def runnable(recipe: Recipe, world_size: int | None) -> tuple[Recipe, Layout]:
    """A recipe whose trainer and layout can run, with the folder of its weights; its layout. Raises EvenloadError."""
    require_own_loop(recipe.trainer)
    if recipe.model.weights is not None or recipe.train.export is not None or recipe.adapts:
        require_for_folders("a folder of weights or adapters")
    refuse_first(*trainer_called(recipe.trainer).run_rules(recipe), *_without_writers(recipe))
    if recipe.log.trace is not None and os.environ.get("RANK", "0") == "0":  # the rank that writes it
        refuse_pictures(trace=recipe.log.trace)
    layout = recipe.layout(world_size)
    if layout.cp > 1:
        do = "set parallel.cp=1, and let plugins.mesh put long sequences on several ranks"
        raise EvenloadError("static context parallelism can be planned, not run", f"parallel.cp {layout.cp}", do)
    if recipe.model.weights is not None:
        recipe = recipe.changed({"model.weights": str(folder_of(recipe.model.weights))})
    return recipe, layout


def refuse_longest(source: Source, *chains: PlanChain) -> None:
    """Raise EvenloadError unless the longest samples of all, and the largest groups, can be planned by one of the
    replicas: then no batch has one that cannot."""
    refused = list[EvenloadError]()
    for chain in chains:
        try:
            return _refuse_longest(source, chain)
        except EvenloadError as error:
            refused.append(error)
    raise refused[0]


def _refuse_longest(source: Source, chain: PlanChain) -> None:
    lengths = source.lengths if source.targets is None else source.lengths[source.targets > 0]
    longest = np.sort(lengths)[-chain.context.layout.dp_cp_size :]
    refuse_endless(longest, chain.largest_slice)
    chain.plan(as_lengths(longest))
    if source.groups is not None and source.trunks is None:
        trained = scorable(source)
        groups = source.groups[trained]
        largest = np.argsort(np.bincount(groups, source.lengths[trained]))[-chain.context.layout.dp_cp_size :]
        places = np.isin(groups, largest)
        chain.of_groups(groups[places]).plan(as_lengths(source.lengths[trained[places]]))


def open_data(recipe: Recipe) -> Source:
    """What a recipe trains on. Raises EvenloadError."""
    return open_all(recipe.data, recipe.data.source, recipe.data.domain_sources, recipe.model.weights)


def open_all(data: Data, spec: str | None, domains: Mapping[str, str] | None, weights: Path | None) -> Source:
    """The samples of a source, or of several by name, in whose place it stands. Raises EvenloadError."""
    if domains is None:
        assert spec is not None, "the rules of a recipe ask for one of both"
        return open_samples(data, spec, weights)
    parts = {}
    for name, own in domains.items():
        with naming_domain(name):
            parts[name] = open_samples(data, own, weights)
    return MixedSource(parts)


def refuse_unscored(recipe: Recipe, source: Source, draws: Sequence[Draw]) -> None:
    """Raise EvenloadError where the domain whose loss tells the best checkpoint has no sample in a validation."""
    best = recipe.checkpoint.best
    if isinstance(source, MixedSource) and best in source.domains:
        place = source.domains.index(best)
        missing = not any((draw.domain == place).any() for draw in draws if draw.domain is not None)
        what = f"checkpoint.best is by the loss of {best}, and no sample of it is validated"
        detail = f"data.validation.batches {recipe.data.validation.batches}" if recipe.data.validation else ""
        refuse_first((missing, what, detail, "raise data.validation.batches, or leave it out"))


def refuse_unsampled(recipe: Recipe, config: ScoredSamples) -> None:
    """Raise EvenloadError where prompts of a validation cannot be continued, or scored by what is named."""
    prompted(recipe, tokenizer_of(recipe.data, recipe.model.weights), config.prompts, config.samples)
    functions_of(config, "data.validation.generate")
    warn_of_rescore(config, "data.validation.generate", (0.0, 1.0))
    if config.answer:
        user_function(config.answer, "data.validation.generate.answer")
    if recipe.generate.collect:
        logger.warning("generate.collect has no effect in data.validation.generate: all samples of a prompt count")


def open_samples(data: Data, spec: str, weights: Path | None) -> Source:
    """Data under these settings, and the tokenizer of the model's folder where no other is named. Raises
    EvenloadError."""
    settings = data.model_dump(exclude={"source", "domains", "mix", "validation"})
    return open_source(spec, **settings | {"tokenizer": tokenizer_of(data, weights)})


def tokenizer_of(data: Data, weights: Path | None) -> str:
    """What data.tokenizer says, or the model's folder where no other is named and it has one."""
    return (
        str(weights)
        if weights is not None and data.tokenizer == "bytes" and holds_tokenizer(weights)
        else data.tokenizer
    )


def refuse_other_tokenizer(recipe: Recipe) -> None:
    """Raise EvenloadError where the tokenizer next to the weights, which leaves with the model, knows more tokens than
    the model."""
    weights, known = recipe.model.weights, recipe.model.vocab_size
    if weights is None or known is None or not reading.is_file(weights / "tokenizer.json"):
        return
    tokens = open_tokenizer(str(weights / "tokenizer.json")).vocab_size
    if tokens > known:
        what = f"the tokenizer of model.weights {shorten(str(weights))} is not that of its model"
        detail = f"token ids up to {tokens - 1}, a vocabulary of {known}"
        raise EvenloadError(what, detail, "put the model's own tokenizer.json into the folder, or take it out")


def with_vocabulary(recipe: Recipe, *sources: Source) -> Recipe:
    """The recipe with ``model.vocab_size``: the data's, rounded up so that every tensor-parallel rank has a share. That
    of a folder of weights stays as it is."""
    vocab_size, tp = recipe.model.vocab_size, math.lcm(*(one.parallel.tp for one in recipe.of_replicas))
    least = max(source.vocab_size for source in sources)
    if vocab_size is None:
        multiple = math.lcm(_VOCABULARY_MULTIPLE, tp)
        return recipe.changed({"model.vocab_size": -(-least // multiple) * multiple})
    if vocab_size < least:
        detail = f"model.vocab_size {vocab_size}, token ids up to {least - 1}"
        do = "raise model.vocab_size or leave it null"
        if recipe.model.weights is not None:
            do = "set data.tokenizer to that of model.weights"
        raise EvenloadError("the model's vocabulary is smaller than the data's", detail, do)
    if vocab_size % tp and recipe.model.weights is None:
        do = "leave model.vocab_size null: it is then rounded up"
        raise EvenloadError("parallel.tp does not divide model.vocab_size", f"tp {tp}, vocabulary {vocab_size}", do)
    return recipe


def with_steps(recipe: Recipe, source: Source) -> Recipe:
    """The recipe with ``train.steps``, where it asks for epochs or tokens. Raises EvenloadError: there are too many."""
    train = recipe.train
    if train.epochs is None and train.max_tokens is None:
        return recipe
    size, extent = batch_size(recipe), {"epochs": train.epochs, "tokens": train.max_tokens}
    if domains := Domains.of_source(recipe, source):
        steps = domains.mixture.steps(train.seed, **extent)
    elif source.groups is None:
        steps = size.steps(source.lengths, train.seed, **extent)
    else:
        steps = WholeGroups(source.groups, source.lengths, size).steps(train.seed, **extent)
    return recipe.changed({"train.steps": steps, "train.epochs": None, "train.max_tokens": None})


def _without_writers(recipe: Recipe) -> Iterator[Rule]:
    for package, name in (("wandb", "Weights & Biases"), ("tensorboard", "TensorBoard")):
        target, do = getattr(recipe.log, package), f"pip install {package}, or leave log.{package} out"
        missing = target is not None and find_spec(package) is None
        yield missing, f"{name} is not installed", f"log.{package} {target}", do
