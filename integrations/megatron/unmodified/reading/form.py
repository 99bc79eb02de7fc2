"""What a batch has besides its rows: nothing, a mask, or the borders between the samples that its rows hold.

    Megatron's GPTDataset       ``attention_mask`` or nothing; a row is a sample
    Megatron-LM's ``--sft``     ``cu_seqlens`` [b, n], ``max_seqlen`` [b]; a row holds samples side by side
    Megatron-Bridge             ``cu_seqlens_q``, ``cu_seqlens_kv`` and perhaps both with ``_padded``, ``max_seqlen_q``,
                                ``max_seqlen_kv``, ``padding_mask``; or as NeMo had it: ``cu_seqlens`` filled up with
                                -1, ``cu_seqlens_argmin``, perhaps both of ``cu_seqlens_unpadded``, ``max_seqlen``

A `Form` remembers which keys there were and how their values looked, and says them of a pack, so that code that reads
them goes on. It is data: a rank without batches can be sent it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .....core.errors import EvenloadError
from .....runtime.attention.pack import Pack
from .borders import COUNTS

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
MASK = "attention_mask"

_PADDED = {"cu_seqlens_q_padded", "cu_seqlens_kv_padded", "cu_seqlens_padded"}
_ALL_BORDERS = {*_PADDED, "cu_seqlens", "cu_seqlens_unpadded", "cu_seqlens_q", "cu_seqlens_kv"}
_LONGEST = {"max_seqlen", "max_seqlen_q", "max_seqlen_kv"}
_NOT_READ = {"dataset_id", "token_count", "contexts", "context_lengths", "answers", "metadata"}
"""What Megatron's and Megatron-Bridge's loaders add and their steps leave alone; packs have none of it."""

_KNOWN = {*FIELDS, MASK, *_ALL_BORDERS, *COUNTS, *_LONGEST, *_NOT_READ, "padding_mask", "total_tokens", "input_ids"}


class Look(NamedTuple):
    """How a value of a batch looked."""

    dims: int | None
    """None: it is no tensor."""
    dtype: torch.dtype | None = None
    filled: bool = False
    """Its rows are filled up with negative numbers."""


@dataclass(frozen=True)
class Form:
    """The keys of a batch besides `FIELDS`, and how their values looked."""

    looks: Mapping[str, Look | None]
    """None: the key is there, without a value."""

    @property
    def has_borders(self) -> bool:
        """Whether a row holds samples side by side, with their borders."""
        return any(look is not None and key in _ALL_BORDERS for key, look in self.looks.items())

    def beside(self, pack: Pack, tokens_T: Tensor) -> dict[str, Any]:
        """The values of these keys for a pack."""
        return {key: look and _value(key, look, pack, tokens_T, self.looks) for key, look in self.looks.items()}


def form_of(batch: Any) -> Form:
    """The form of a batch. Raises EvenloadError for one that is not known."""
    keys = set(batch) if isinstance(batch, Mapping) else None
    if keys is None or not set(FIELDS) <= keys or not keys <= _KNOWN:
        odd = "" if keys is None else ", ".join(sorted(map(str, keys - _KNOWN or keys))) or "none"
        raise EvenloadError(
            f"evenload packs batches of {', '.join(FIELDS)}, perhaps with {MASK} or the borders of packed samples",
            f"the data iterator gives {f'keys {odd}' if keys is not None else type(batch).__name__}",
            "give batches as Megatron's GPTDataset, its --sft or Megatron-Bridge do, or disable evenload's plugins",
        )
    fields = {name: batch[name] for name in FIELDS}
    shapes = {name: tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__ for name, f in fields.items()}
    if len(set(shapes.values())) > 1 or not isinstance(shapes["tokens"], tuple) or len(shapes["tokens"]) != 2:
        detail = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise EvenloadError("the fields of a batch have not all one shape [b, s]", detail, "mend the dataset")
    return Form({key: _look(value) for key, value in batch.items() if key not in FIELDS and key not in _NOT_READ})


def _look(value: Any) -> Look | None:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return Look(None)
    whole = not value.is_floating_point() and value.dtype != torch.bool
    return Look(value.dim(), value.dtype, whole and bool((value < 0).any()))


def _value(key: str, look: Look, pack: Pack, tokens_T: Tensor, looks: Mapping[str, Look | None]) -> Any:
    """What a batch of a form with these keys would have under ``key`` for a pack."""
    if key == MASK:
        # Of a single place that masks nothing: the model is given none, and loops move what they have to the device.
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=tokens_T.device)
    if key == "input_ids":
        return tokens_T[None]
    if key == "total_tokens":
        return _shaped(torch.tensor([pack.num_padded_tokens]), look)
    if key == "padding_mask":
        mask_T = torch.zeros(pack.num_padded_tokens, dtype=torch.bool, device=tokens_T.device)
        for length, start, stop in zip(pack.lengths, pack.segments, pack.segments[1:], strict=False):
            mask_T[start + length : stop] = True
        return mask_T[None]
    if key in _LONGEST:
        return _shaped(torch.tensor([max(b - a for a, b in pairwise(pack.segments))]), look)
    if key in COUNTS:
        return _shaped(torch.tensor([len(pack.segments)]), look)
    # Of two lists of borders one is without padding; a single one has it.
    twins = {"cu_seqlens_q": "cu_seqlens_q_padded", "cu_seqlens_kv": "cu_seqlens_kv_padded"}
    twin = twins.get(key, "cu_seqlens_padded" if key == "cu_seqlens" else "")
    borders = pack.cu_seqlens if looks.get(twin) or key == "cu_seqlens_unpadded" else pack.cu_seqlens_padded
    ends = borders.new_tensor([-1] if look.filled else [])
    return _shaped(torch.cat([borders, ends]), look)


def _shaped(value_N: Tensor, look: Look) -> Any:
    """Numbers [N] as they looked in the batch: [], [N] or [1, N], or a Python number."""
    if look.dims is None:
        return int(value_N) if value_N.numel() == 1 else value_N.tolist()
    value = value_N.to(look.dtype)
    return value.view(()) if look.dims == 0 else value.view(*(1 for _ in range(look.dims - 1)), -1)
