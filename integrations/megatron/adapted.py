"""The linear layers of a Megatron model that can have adapters, under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state
from torch import nn

from ...core.recipe.recipe import Recipe
from ...runtime.adapters.peers import AdapterPeers
from ...runtime.adapters.places import AdaptedBlock, Place, Site
from ...runtime.attention.pack import Pack
from .model.v_shape import stages_of
from .model.weights import global_parameters
from .pretrained.pieces import pieces_of

_LINEARS = tuple(f"{name}.weight" for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))


def blocks_of(model: nn.Module, recipe: Recipe, tp_rank: int) -> list[AdaptedBlock]:
    """The decoder layers of this rank's stage, with the linear layers that Hugging Face's model of the family has."""
    modules = {id(m.weight): m for m in model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}
    sites: dict[str, Site] = {}
    for name, parameter in global_parameters(model):
        if name.endswith(_LINEARS):
            places = tuple(_places(name, parameter, recipe, tp_rank))
            sites[name] = Site(modules[id(parameter)], places, *_sums(parameter, recipe.parallel.tp))
    return [
        AdaptedBlock(layer, _pack_of, tuple(s for n, s in sites.items() if f"layers.{layer.layer_number - 1}." in n))
        for gpt in stages_of(model)
        for layer in gpt.decoder.layers
    ]


def adapter_peers(tp_rank: int) -> AdapterPeers:
    """The ranks that adapters are summed, compared and gathered over."""
    return AdapterPeers(
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_model_parallel_group(),
        counts=tp_rank == 0,
    )


def _places(name: str, parameter: nn.Parameter, recipe: Recipe, tp_rank: int) -> Iterator[Place]:
    for piece in pieces_of(name, parameter, recipe, tp_rank):
        outputs, inputs = piece.shape
        columns = piece.columns or (0, inputs)
        layer = piece.name.removesuffix(".weight")
        yield Place(layer, outputs, inputs, piece.rows, columns, piece.groups, piece.first)


def _sums(parameter: Any, tp: int) -> tuple[Any, ...]:
    if tp == 1:
        return ()
    kind = "gradients" if parameter.partition_dim == 0 else "products"
    return kind, parallel_state.get_tensor_model_parallel_group()


def _pack_of(_: tuple[Any, ...], words: dict[str, Any]) -> Pack:
    pack: Pack = words["packed_seq_params"].pack
    return pack
