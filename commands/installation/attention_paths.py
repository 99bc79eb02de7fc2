"""Which attention kernel each training loop takes on this machine, and why none of the faster ones."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ...core.recipe.recipe import Recipe
from ...core.recipe.traits import TRANSFORMER_ENGINE, all_loops

_WHOLE = "samples stay whole there"


def attention_paths(recipe: Recipe | None) -> list[dict[str, Any]]:
    """A row a path: the kernel of whole samples, that of parts of samples, and why no faster one. Empty without torch.

    Precision and head dimension are the recipe's; without one bfloat16 and 128 are asked for.
    """
    if find_spec("torch") is None:
        return []
    import torch

    from ...runtime.attention.blocks import BLOCKS
    from ...runtime.attention.kernels import KERNELS, explain

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(recipe.train.dtype if recipe else "", torch.bfloat16)
    inputs = (device, dtype, _head_dim(recipe))
    (kernel, why), (block, why_block) = explain(KERNELS, *inputs), explain(BLOCKS, *inputs)
    rows = []
    for loop, spec in ((one, spec) for one in all_loops() for spec in one.specs):
        path = f"{loop.name}, {spec}" if spec else loop.name
        if spec == TRANSFORMER_ENGINE:
            rows.append(_transformer_engine(path, block, why_block))
            continue
        parts = {"parts": block, "why_parts": why_block} if loop.cuts else {"parts": None, "why_parts": _WHOLE}
        rows.append({"path": path, "kernel": kernel, "why": why, **parts})
    return rows


def _transformer_engine(path: str, block: str, why_block: str) -> dict[str, Any]:
    """Its own kernels take whole samples alone, in place of which packed attention runs parts."""
    if find_spec("transformer_engine") is None:
        why = "Transformer Engine is not installed"
        return {"path": path, "kernel": None, "why": why, "parts": None, "why_parts": why}
    return {"path": path, "kernel": "transformer_engine", "why": "", "parts": block, "why_parts": why_block}


def _head_dim(recipe: Recipe | None) -> int:
    if recipe is None:
        return 128
    return recipe.model.head_dim or recipe.model.hidden_size // recipe.model.num_attention_heads
