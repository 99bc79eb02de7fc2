"""Weights of a Hugging Face folder in a Megatron model: each rank reads the slices that it holds, and nothing else."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ....core.errors import EvenloadError, shorten
from ....core.recipe.recipe import Recipe
from ...huggingface.folders.reading import WeightFolder, refuse_unlike
from ..model.weights import global_parameters
from ..saving.checkpoint import agreed
from .families import names_of, without_place
from .pieces import Piece, pieces_of

log = logging.getLogger("evenload")


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
            parameter.zero_()  # rows behind the vocabulary
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
