"""What sparse scoring does not go with, and where its settings have no effect."""

from __future__ import annotations

from typing import Any

from ..errors import Rule
from .sections import SPARSE_BLOCKS, Sparse
from .sizes import shape_of


def rules_of_sparse(recipe: Any) -> list[Rule]:
    """A lossy choice has a limit, and a cap that holds what one sample keeps."""
    sparse: Sparse = recipe.sparse
    if not sparse.is_on:
        return []
    least, cap = state_bytes_of(recipe, sparse.min_length), sparse.state_bytes
    return [
        (
            sparse.limit == 0,
            "sparse.limit 0 allows no error, and only dense attention has none",
            f"sparse.choose {sparse.choose}, limit 0",
            "set sparse.choose=dense, or a limit such as 0.002",
        ),
        (
            sparse.choose == "kept" and cap is not None and cap < least,
            "sparse.state_bytes holds the blocks of no sample",
            f"{cap} bytes; one of sparse.min_length {sparse.min_length} tokens takes {least}",
            f"raise it to {least} or more, leave it out, or choose sample",
        ),
    ]


def state_bytes_of(recipe: Any, length: int) -> int:
    """Bytes that the blocks of a sample of so many tokens take on a rank: a bit each, of every layer and key/value head
    that it has."""
    queries, keys = SPARSE_BLOCKS
    shape, p = shape_of(recipe.model), recipe.parallel
    blocks = -(-length // queries)
    bits = shape.kv_size // shape.head_size // p.tp * blocks * ((blocks - 1) * queries // keys)
    return int(-(-bits // 8) * (shape.num_layers // p.pp))


def idle_of_sparse(recipe: Any) -> list[str]:
    """Messages about settings of `sparse` that have no effect in training."""
    sparse: Sparse = recipe.sparse
    asked = [f"sparse.{key}" for key in sorted(sparse.model_fields_set - {"choose"})]
    if sparse.choose == "dense":
        return [f"{' and '.join(asked)} without effect: sparse.choose is dense"] if asked else []
    if sparse.mass == 1:
        return ["sparse has no effect: with sparse.mass 1 all keys are kept, and scoring is dense"]
    said = []
    if sparse.state_bytes is not None and sparse.choose != "kept":
        said.append(f"sparse.state_bytes has no effect: sparse.choose is {sparse.choose}, and kept alone keeps blocks")
    if recipe.data.max_length < sparse.min_length:
        text = "sparse has no effect: data.max_length %d is below sparse.min_length %d"
        said.append(text % (recipe.data.max_length, sparse.min_length))
    if recipe.adapts:
        said.append("sparse has no effect on tenants: their evaluations are dense")
    elif recipe.data.validation is None and not any(map(recipe.data_policy, ("select", "weight"))):
        said.append("sparse has no effect in train: there are no data.validation, plugins.data.select and weight")
    return said
