"""Vocabularies that tensor parallelism does not divide: rows without a token, which change no number.

Megatron gives every tensor-parallel rank equally many rows of embedding and output layer. Rows after the vocabulary
are zero and never looked up, and their logits are -inf: exp(-inf) = 0 leaves the softmax of the others as it is, and
hands no gradient back.
"""

from __future__ import annotations

import math
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from ....core.recipe.recipe import Recipe


def padded_vocabulary(recipe: Recipe) -> int:
    """Rows of the embedding over all tensor-parallel ranks."""
    vocabulary, tp = recipe.model.vocab_size, recipe.parallel.tp
    assert vocabulary is not None
    return -(-vocabulary // tp) * tp


def hide_padding(output_layer: Any, recipe: Recipe) -> None:
    """Let the logits of rows after the vocabulary be -inf, and absent where all ranks' logits are gathered."""
    whole = padded_vocabulary(recipe)
    if whole == recipe.model.vocab_size:
        return
    rows = whole // recipe.parallel.tp
    own = rows_with_tokens(recipe, parallel_state.get_tensor_model_parallel_rank() * rows, rows)

    def hide(_: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        if logits.shape[-1] == whole:
            return logits[..., : recipe.model.vocab_size], bias
        logits[..., own:] = -math.inf
        return logits, bias

    output_layer.register_forward_hook(hide)


def rows_with_tokens(recipe: Recipe, first: int, rows: int) -> int:
    """How many of ``rows`` rows of the vocabulary from ``first`` on have a token."""
    assert recipe.model.vocab_size is not None
    return min(rows, max(0, recipe.model.vocab_size - first))
