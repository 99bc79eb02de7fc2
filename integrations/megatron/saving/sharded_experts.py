"""Experts that are cut over their group, saved and loaded as Megatron's own: whole, at their homes.

While a checkpoint is written or read Megatron's experts stand in the model, and an optimizer of theirs, built as for a
model whose experts are not cut, stands in the place of the pieces' one. All that Megatron saves is then what it would
save, whatever its optimizer is; the checkpoint loads where experts are not cut, and the other way round. It takes the
memory of whole experts for that long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..model.gpt import adam_states, build_optimizer, wrap_model
from ..model.sharded_experts import ShardedExperts
from .optimizer import rows_of, write_rows


@contextmanager
def experts_at_home(host: Any, *, loading: bool) -> Iterator[None]:
    """Experts and their optimizer are Megatron's own inside; after a load the pieces get what was read. Collective."""
    if not host.recipe.sharded_experts:
        yield
        return
    layers = {layer: layer.mlp.experts for layer in host.model.decoder.layers if hasattr(layer.mlp, "experts")}
    pieces, chain = host.optimizer.chained_optimizers[-1], host.optimizer.chained_optimizers
    try:
        whole = _whole_optimizer(host, pieces, list(layers.values()))
        for layer, experts in layers.items():
            layer.mlp.experts = experts.home
        host.optimizer.chained_optimizers = [*chain[:-1], whole]
        yield
        if loading:
            _cut(host, whole, pieces, list(layers.values()))
    finally:
        host.optimizer.chained_optimizers = chain
        for layer, experts in layers.items():
            layer.mlp.experts = experts
            experts.empty_home()


def _whole_optimizer(host: Any, pieces: Any, layers: list[ShardedExperts]) -> Any:
    """Megatron's optimizer of whole experts, which get their weights, with the states of the pieces' one."""
    modules = nn.ModuleList(experts.fill_home() for experts in layers)
    recipe = host.recipe.changed({"megatron.distributed_optimizer": host.ddp.ddp_config.use_distributed_optimizer})
    # Megatron makes an optimizer of dense parameters, here of none, and one of experts.
    whole = build_optimizer(recipe, wrap_model(recipe, host.model.config, modules)).chained_optimizers[-1]
    for experts in layers:
        rows = rows_of(pieces, experts.shards).view(3, *experts.shards.shape)
        columns = zip(*(experts.at_home(row) for row in rows), strict=True)
        for parameter, values in zip(experts.home.parameters(), columns, strict=True):
            write_rows(whole, parameter, torch.stack([value.flatten() for value in values]))
    _copy_settings(pieces, whole)
    return whole


@torch.no_grad()
def _cut(host: Any, whole: Any, pieces: Any, layers: list[ShardedExperts]) -> None:
    """Give the pieces, and their optimizer, what whole experts and theirs have."""
    for experts in layers:
        parameters = list(experts.home.parameters())
        experts.shards.copy_(experts.from_home([p.detach() for p in parameters]))
        columns = zip(*(rows_of(whole, parameter) for parameter in parameters), strict=True)
        write_rows(pieces, experts.shards, torch.stack([experts.from_home(row).flatten() for row in columns]))
    _copy_settings(whole, pieces)


def _copy_settings(source: Any, target: Any) -> None:
    """What an optimizer has besides tensors of weights: the settings of its groups, and Adam's step."""
    for ours, theirs in zip(target.param_groups, source.param_groups, strict=True):
        ours.update({name: value for name, value in theirs.items() if name != "params"})
    steps = [state["step"] for state in adam_states(source) if "step" in state]
    for state in adam_states(target):
        if steps:
            state["step"] = steps[0].clone()
