"""A pack as the arguments of a Hugging Face model's call."""

from __future__ import annotations

from typing import Any

import torch

from ...runtime.attention.pack import Pack
from .attention import PACK


def inputs_of(pack: Pack, *, with_mask: bool) -> dict[str, Any]:
    """Tensors [1, T] and the pack itself.

    ``labels`` stand where their token does, as in a row of a script's own; ``shift_labels`` are what the model would
    make of them, and reach over the end of a slice. ``with_mask``: an ``attention_mask`` too, which scripts count by;
    attention goes by the pack.
    """
    mask = {"attention_mask": (pack.sequence_ids_T >= 0).long()[None]} if with_mask else {}
    return {
        "input_ids": pack.tokens_T[None],
        "labels": torch.cat([pack.labels_T[-1:], pack.labels_T[:-1]])[None],
        "shift_labels": pack.labels_T[None],
        "position_ids": pack.positions_T[None],
        "use_cache": False,
        PACK: pack,
        **mask,
    }
