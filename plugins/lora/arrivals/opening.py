"""A tenant's file becomes a tenant: its data are opened, and whatever is wrong is found before it joins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ....core.errors import EvenloadError, refuse_first
from ....core.planning.chain import PlanChain
from ....core.planning.forward_only import forward_only
from ....core.recipe.adapter import Adapter
from ....core.recipe.recipe import Recipe
from ....data.formats import refuse_outside
from ....data.samples.order import BatchSize
from ....data.sources import Source
from ....integrations.huggingface.folders.adapters import read_adapter
from ....training.drawing import Domains, Drawing, columns_of
from ....training.preflight import open_all, refuse_longest
from ..state.drawing import steps_of
from ..state.tenant import ActiveTenant
from ..tenant_file import Tenant
from .preflight import config_of


class Entrant(NamedTuple):
    """A tenant that would join, as its file says."""

    name: str
    file: str
    """Name of the file: its own, or that of the sweep whose trial it is."""
    config: Tenant
    digest: str
    """Of the file."""


def open_tenant(
    entrant: Entrant,
    number: int,
    recipe: Recipe,
    chains: Sequence[PlanChain],
    order: Mapping[str, Any] | None = None,
) -> tuple[ActiveTenant, Mapping[str, Tensor] | None]:
    """Open the data of who would join a job of replicas with these planners; ``order``: where its batches go on. Raises
    EvenloadError, also for samples that none of them can plan.

    Along with the tenant come the weights of the folder that its adapter goes on from; None: drawn from its seed.
    """
    config, root = entrant.config, config_of(recipe).root
    if root is not None:
        refuse_outside(root, config.opens())
    adapter, weights = _adapter_of(config)
    source = _open(config, config.data.source, config.data.domain_sources, recipe)
    _refuse_short(source, config)
    refuse_longest(source, *chains)
    scored = config.model_copy(
        update={"data": config.data.model_copy(update={"weight_column": None, "weight_divisor": None})}
    )
    held_out = _open(scored, config.evaluate.source, None, recipe) if config.evaluate else None
    if held_out is not None:
        refuse_longest(held_out, *map(forward_only, chains))
    size, seed = BatchSize(config.train.batch_size), config.train.seed
    domains = Domains.of_data(config.data, size, source)
    tenant = ActiveTenant(
        number=number,
        name=entrant.name,
        config=config,
        source=source,
        drawing=Drawing(order, source.lengths, size, chains[0], seed=seed, domains=domains, **columns_of(source)),
        steps=steps_of(config.train, source.lengths, domains),
        adapter=adapter,
        file=entrant.file,
        held_out=held_out,
        digest=entrant.digest,
    )
    return tenant, weights


def _open(config: Tenant, spec: str, domains: Mapping[str, str] | None, recipe: Recipe) -> Source:
    """Data that the model knows all tokens of, of one source or of several by name. Raises EvenloadError."""
    source, known = open_all(config.data, spec, domains, recipe.model.weights), recipe.model.vocab_size
    assert known is not None, "preflight knows the vocabulary"
    if source.vocab_size > known:
        detail = f"{source.name} has token ids up to {source.vocab_size - 1}, the base a vocabulary of {known}"
        do = "set data.tokenizer to that of the base"
        raise EvenloadError("the base's vocabulary is smaller than the data's", detail, do)
    return source


def _refuse_short(source: Source, config: Tenant) -> None:
    here, wanted = len(source.lengths), config.train.batch_size
    what, detail = "the data hold fewer samples than one batch", f"{here} samples, train.batch_size {wanted}"
    refuse_first((here < wanted, what, detail, "lower train.batch_size"))


def _adapter_of(config: Tenant) -> tuple[Adapter, Mapping[str, Tensor] | None]:
    """The adapter that is trained, and its weights where it goes on from a folder. Raises EvenloadError."""
    if config.start is None:
        return config.adapter, None
    adapter, weights = read_adapter(config.start)
    if "adapter" in config.model_fields_set:
        _refuse_other_adapter(config.adapter, adapter, weights, config.start)
        return config.adapter, weights
    return adapter, weights


def _refuse_other_adapter(said: Adapter, read: Adapter, weights: Mapping[str, Tensor], start: Path) -> None:
    """Raise EvenloadError where a file asks for another adapter than that of the folder it goes on from."""
    layers = sorted({name.rpartition(".")[0] for name in weights})
    aspects = {"target_modules": said.targets(layers) == layers == sorted(read.targets(layers))}
    aspects["r"] = all(said.rank_of(layer) == read.rank_of(layer) for layer in layers)
    aspects["lora_alpha"] = all(said.scaling_of(layer) == read.scaling_of(layer) for layer in layers)
    for key, same in aspects.items():
        detail = f"{getattr(said, key)} in the file, {getattr(read, key)} in {start}"
        what = f"adapter.{key} is not that of the adapter to go on with"
        refuse_first((not same, what, detail, "leave adapter out: the folder says it, or leave from out"))
