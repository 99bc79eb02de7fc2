"""Which part of a Hugging Face tensor a part of a Megatron parameter is, on the tensor-parallel rank that holds it.

A column-parallel parameter is cut by rows, of which each of its Hugging Face tensors gives some to every rank, one run
after the other: query groups, a part of gate and a part of up. A row-parallel one is cut by columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ....core.recipe.recipe import Recipe
from ....core.recipe.sections import Model
from ..model.vocabulary import rows_with_tokens
from .families import names_of


class Piece(NamedTuple):
    """A part of a Hugging Face tensor that lies in one parameter."""

    name: str
    """Of the tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    rows: tuple[int, int]
    """Of the tensor: from the first on, up to the second."""
    columns: tuple[int, int] | None
    """The same; None: all, or the tensor is a vector."""
    groups: int
    """The parameter's rows are so many groups of equal size, of each of which the piece has a run."""
    first: int
    """Row of a group where the run begins."""

    def within(self, parameter: Tensor) -> Tensor:
        """The rows of the parameter that the piece is, [groups, run, ...]: a view."""
        run = (self.rows[1] - self.rows[0]) // self.groups
        return parameter.detach().view(self.groups, -1, *parameter.shape[1:])[:, self.first : self.first + run]

    def of_whole(self, tensor: Tensor) -> Tensor:
        """The piece of a whole tensor, [rows, ...]: a view."""
        rows = tensor[slice(*self.rows)]
        return rows if self.columns is None else rows[:, slice(*self.columns)]


def pieces_of(name: str, parameter: Any, recipe: Recipe, tp_rank: int) -> list[Piece]:
    """What one parameter of this rank is made of, first to last; nothing where Transformers' model of the family has no
    such tensor.

    Args:
        name: the parameter's global name.
        parameter: it, or a tensor of its shape.
    """
    names, tp = names_of(recipe.model.family, name), recipe.parallel.tp
    cut = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
    parts, part = (tp, tp_rank) if cut == 0 else (1, 0)
    groups, runs = _rows_of(len(names), parameter.shape[0], recipe.model, parts)
    columns, rest = None, tuple(parameter.shape[1:])
    if cut == 1:
        columns, rest = (tp_rank * rest[0], (tp_rank + 1) * rest[0]), (tp * rest[0],)
    pieces, first = [], 0
    for tensor, run in zip(names, runs, strict=True):
        rows = groups * run
        pieces.append(Piece(tensor, (parts * rows, *rest), (part * rows, (part + 1) * rows), columns, groups, first))
        first += run
    return [_with_tokens(piece, recipe) for piece in pieces] if name.endswith(OF_VOCABULARY) else pieces


OF_VOCABULARY = "word_embeddings.weight", "output_layer.weight"


def _rows_of(num_names: int, rows: int, model: Model, parts: int) -> tuple[int, list[int]]:
    """Groups of a parameter's rows on one of so many ranks, and the run that each of its tensors has of a group."""
    if num_names == 3:
        queries = model.num_attention_heads // model.kv_heads * model.head_size
        return model.kv_heads // parts, [queries, model.head_size, model.head_size]
    return 1, [rows // max(1, num_names)] * num_names


def _with_tokens(piece: Piece, recipe: Recipe) -> Piece:
    """The piece without rows after the vocabulary."""
    first, stop = piece.rows
    assert recipe.model.vocab_size is not None
    rows = first, first + rows_with_tokens(recipe, first, stop - first)
    return piece._replace(shape=(recipe.model.vocab_size, *piece.shape[1:]), rows=rows)
