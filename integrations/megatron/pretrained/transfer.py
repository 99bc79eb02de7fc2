"""Weights of a Megatron model from a Hugging Face folder, and as the tensors of one.

Each rank reads the slices that it holds, and nothing else. To give them back, ranks first tell each other which parts
of which tensors they have. Then all go through the tensors in one order: whoever has a part sends it, and rank 0 puts
it in its place. A rank takes the memory of one tensor on top of its model, and where experts are cut over their group
(`model.sharded_experts`) that of its own experts of one layer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from ....core.errors import EvenloadError, refuse_first, shorten
from ....core.recipe.recipe import Recipe
from ....runtime.world.agreement import everyone, rank_and_size, wire_device
from ...huggingface.folders.reading import WeightFolder, refuse_unlike
from ..base.traits import export_rules
from ..model.sharded_experts import ShardedExperts
from ..model.weights import global_parameters, names_at_home, sharded_experts
from ..saving.checkpoint import agreed
from .families import names_of, without_place
from .pieces import Piece, pieces_of

log = logging.getLogger("evenload")

Exported = Iterator[tuple[str, Tensor | None]]


def read_pretrained(model: Any, recipe: Recipe, tp_rank: int) -> None:
    """Fill a bare GPTModel of one stage from ``model.weights``, in the dtype that its parameters have. Collective.

    Raises EvenloadError on every rank where one of them does not find what its part of the model needs.
    """
    agreed(lambda: _read(model, recipe, tp_rank))


@torch.no_grad()
def _read(model: Any, recipe: Recipe, tp_rank: int) -> bool:
    assert recipe.model.weights is not None
    folder = WeightFolder.open(recipe.model.weights)
    parts = [(name, p, pieces_of(name, p, recipe, tp_rank)) for name, p in global_parameters(model)]
    for name, _, pieces in parts:
        if not pieces:
            what = f"the model has {name}, which no {recipe.model.family} of Transformers has"
            raise EvenloadError(what, f"model.weights {folder.path}", "leave out of model.moe what the folder lacks")
        for piece in pieces:
            folder.require(piece.name, piece.shape)
    _refuse_other_output(folder, recipe)
    if unknown := without_place(recipe.model.family, folder.names):
        log.warning("%s: %d tensors have no place in the model: %s", folder.path, len(unknown), shorten(str(unknown)))
    for _, parameter, pieces in parts:
        if sum(piece.rows[1] - piece.rows[0] for piece in pieces) < parameter.shape[0]:
            parameter.zero_()  # rows after the vocabulary
        for piece in pieces:
            _copy(folder, piece, piece.within(parameter))
    return True


def _refuse_other_output(folder: WeightFolder, recipe: Recipe) -> None:
    """Raise EvenloadError where embedding and output layer are tied, and the folder has another output layer."""
    ends = ("embedding.word_embeddings.weight", "output_layer.weight")
    (embedding,), (output,) = (names_of(recipe.model.family, end) for end in ends)
    if recipe.model.tied_embeddings and output in folder:
        refuse_unlike(folder, folder.read, embedding, output, folder.shape(embedding)[0])


def _copy(folder: WeightFolder, piece: Piece, target: torch.Tensor) -> None:
    if not target.numel():
        return
    columns = None if piece.columns is None else slice(*piece.columns)
    target.copy_(folder.read(piece.name, slice(*piece.rows), columns).view_as(target))


def exported(model: nn.Module, recipe: Recipe, tp_rank: int) -> Exported:
    """(Hugging Face name, tensor on the CPU of rank 0, None elsewhere) of every tensor of a model, in the dtype of its
    parameters. Collective in every turn. Raises EvenloadError, at once, for a model that no family of Transformers is.

    Args:
        model: the bare GPTModel of this rank's stage.
    """
    refuse_first(*export_rules(recipe))
    return _gathered(_Held(model, recipe, tp_rank), next(model.parameters()).dtype)


class _Part(NamedTuple):
    piece: Piece
    parameter: str
    """By its global name."""
    layer: int
    """Whose experts have it, cut over their group; -1: it lies in a parameter of the rank's own."""


class _Held:
    """What this rank has of a model and sends: of what several ranks have alike, one of them does."""

    def __init__(self, model: nn.Module, recipe: Recipe, tp_rank: int) -> None:
        self.parts: dict[str, list[_Part]] = {}
        """Of tensors, by their Hugging Face names."""
        self._parameters: dict[str, Tensor] = {}
        self._sharded: dict[int, tuple[str, ShardedExperts]] = {}
        self._fetched, self._experts = -1, dict[str, Tensor]()
        modules = sharded_experts(model)
        for name, parameter in global_parameters(model):
            if not _is_sent(parameter):
                continue
            if parameter not in modules:
                self._parameters[name] = parameter
                self._add(recipe, tp_rank, -1, [(name, parameter)])
                continue
            experts, layer = modules[parameter], int(name.split(".")[2])
            self._sharded[layer] = name, experts
            shapes = experts.shapes * len(experts.local_experts)
            empty = (torch.empty(shape, device="meta") for shape in shapes)
            self._add(recipe, tp_rank, layer, zip(names_at_home(experts, name), empty, strict=True))

    def _add(self, recipe: Recipe, tp_rank: int, layer: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            for piece in pieces_of(name, tensor, recipe, tp_rank):
                self.parts.setdefault(piece.name, []).append(_Part(piece, name, layer))

    def fetch(self, layer: int) -> None:
        """Have the experts of a layer whole, where this rank has pieces of them. Collective over their group."""
        if layer != self._fetched:
            self._fetched, self._experts = layer, {}
            if layer in self._sharded:
                name, experts = self._sharded[layer]
                self._experts = dict(zip(names_at_home(experts, name), experts.at_home(experts.shards), strict=True))

    def values(self, part: _Part) -> Tensor:
        """Its rows of the tensor, and of these its columns, as they are sent."""
        source = self._parameters if part.layer < 0 else self._experts
        return part.piece.within(source[part.parameter]).flatten(0, 1).to(wire_device()).contiguous()


def _is_sent(parameter: Any) -> bool:
    if not getattr(parameter, "allreduce", True):
        return bool(parallel_state.get_expert_data_parallel_rank() == 0)
    return not getattr(parameter, "shared", False) and parallel_state.get_data_parallel_rank() == 0


@torch.no_grad()
def _gathered(held: _Held, dtype: torch.dtype) -> Exported:
    rank, _ = rank_and_size()
    of_ranks = everyone(held.parts)
    for name in sorted({name for parts in of_ranks for name in parts}, key=_by_numbers):
        parts = [(sender, part) for sender, of_rank in enumerate(of_ranks) for part in of_rank.get(name, ())]
        held.fetch(max(part.layer for _, part in parts))
        whole = torch.empty(parts[0][1].piece.shape, dtype=dtype) if rank == 0 else None
        for sender, part in parts:
            if sender == rank:
                _send(held.values(part), part.piece, whole)
            elif whole is not None:
                _receive(sender, part.piece, whole)
        yield name, whole


def _send(values: Tensor, piece: Piece, whole: Tensor | None) -> None:
    if whole is None:
        dist.send(values, 0)
    else:
        piece.of_whole(whole).copy_(values)


def _receive(sender: int, piece: Piece, whole: Tensor) -> None:
    target = piece.of_whole(whole)
    values = torch.empty(target.shape, dtype=target.dtype, device=wire_device())
    dist.recv(values, sender)
    target.copy_(values)


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
