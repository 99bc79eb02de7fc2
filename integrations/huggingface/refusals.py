"""Batches of Hugging Face tensors whose loss their samples would not keep one by one, refused by name.

Shape legend: B = rows of the batch, T = slots of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ...core.errors import EvenloadError, refuse_first
from ...runtime.attention.pack import IGNORE

_READ = ("input_ids", "labels", "attention_mask", "position_ids", "token_type_ids")

_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What collators of flattened rows give besides: the borders once more, for kernels of flash-attn and of Mamba."""

KEYS = (*_READ, *_BORDERS)
"""What a batch may hold."""

_UNMASKED = "labels[attention_mask == 0] = -100"


class PaddedLabelsError(EvenloadError):
    """A batch whose loss counts padding: dropping the padding would train another objective."""

    def __init__(self, num_labels: int, num_samples: int) -> None:
        self.num_labels, self.num_samples = num_labels, num_samples
        super().__init__(
            "the labels of this batch count padding as targets",
            f"{num_labels} labels of {num_samples} samples are not {IGNORE} where attention_mask is 0",
            f"set labels to {IGNORE} where attention_mask is 0, where the script makes them: {_UNMASKED}",
        )

    def __reduce__(self) -> tuple[type[PaddedLabelsError], tuple[int, int]]:
        """Ranks send it to each other."""
        return PaddedLabelsError, (self.num_labels, self.num_samples)


def raise_together(errors: Iterable[EvenloadError]) -> None:
    """Raise one error for those of many batches and ranks, or return if there are none.

    Labels on padding are counted over all of them, other errors go first; ranks that give the same errors in the same
    order raise the same message.
    """
    padded: list[PaddedLabelsError] = []
    for error in errors:
        if not isinstance(error, PaddedLabelsError):
            raise error
        padded.append(error)
    if padded:
        raise PaddedLabelsError(sum(e.num_labels for e in padded), sum(e.num_samples for e in padded))


def refuse_other_forms(batch: Mapping[str, Any], *, rotary: bool) -> None:
    """Raise EvenloadError for keys and shapes that are not known."""
    other = sorted(str(key) for key in batch if key not in KEYS and batch[key] is not None)
    missing = [key for key in ("input_ids", "labels") if not isinstance(batch.get(key), Tensor)]
    refuse_first(
        (
            bool(other or missing),
            "evenload regroups batches of input_ids and labels",
            f"a batch without {', '.join(missing)}" if missing else f"a batch with {', '.join(other)}",
            "give the model labels, and train on its own loss"
            if "labels" in missing
            else f"give {', '.join(_READ[:4])} and nothing else from the collate function, or leave evenload off",
        )
    )
    shape = tuple(batch["input_ids"].shape)
    types = batch.get("token_type_ids")
    shapes = {key: tuple(batch[key].shape) for key in _READ[:4] if batch.get(key) is not None}
    other_key = next((key for key in shapes if shapes[key] != shape), "other shapes")
    refuse_first(
        (
            len(shape) != 2 or any(other != shape for other in shapes.values()),
            "tensors of a batch are rows of one shape [rows, tokens]",
            ", ".join(f"{key} {list(value)}" for key, value in shapes.items()),
            f"leave {other_key} out of the batch, so that the model makes its own",
        ),
        (
            types is not None and (not rotary or bool(types.any())),
            "token types change what a model computes",
            "token_type_ids" + ("" if rotary else " for a model without rotary positions, which may embed type 0"),
            "leave token_type_ids out of the batch: return_token_type_ids=False in the tokenizer call",
        ),
    )


def refuse_labels_on_padding(labels_BT: Tensor, mask_BT: Tensor) -> None:
    counts = ((labels_BT != IGNORE) & ~mask_BT.bool()).sum(1)
    if bool(counts.any()):
        raise PaddedLabelsError(int(counts.sum()), int(counts.count_nonzero()))


def refuse_left_padding(labels_BT: Tensor, spans: list[tuple[int, int]], *, moves: bool) -> None:
    """Raise EvenloadError where left padding `moves` samples, or the model predicts a first token from it."""
    padded = [(row, first) for row, (first, _) in enumerate(spans) if first]
    targets = sum(int(labels_BT[row, first] != IGNORE) for row, first in padded)
    refuse_first(
        (
            bool(padded) and moves,
            "left padding moves samples to other positions, which a model without rotary positions learns",
            f"{len(padded)} rows with padding on the left",
            "pad on the right: tokenizer.padding_side = 'right'",
        ),
        (
            bool(targets),
            "the first token of a sample is a target after left padding",
            f"{targets} rows whose first label is not {IGNORE}: the model is to predict it from padding",
            f"pad on the right: tokenizer.padding_side = 'right', or set the first label of each sample to {IGNORE}",
        ),
    )


def refuse_half_flattened(batch: Mapping[str, Any], flattened: bool) -> None:
    """Raise EvenloadError where stock attention would look across the samples of a flattened row."""
    refuse_first(
        (
            flattened and batch.get("attention_mask") is not None,
            "position_ids start again inside a row that has an attention_mask, so attention crosses its samples",
            f"input_ids {list(batch['input_ids'].shape)}",
            "leave attention_mask out of flattened rows (TRL: padding_free=True)",
        ),
        (
            flattened and len(batch["input_ids"]) > 1,
            "position_ids start again inside a row of several, which not every attention keeps apart",
            f"input_ids {list(batch['input_ids'].shape)}",
            "flatten the batch to one row [1, tokens] (TRL: padding_free=True)",
        ),
    )


def refuse_crossing_targets(labels_BT: Tensor, borders: list[list[int]]) -> None:
    """Raise EvenloadError where the first token of a sample is the target of the sample before it."""
    inner = [(row, place) for row, of_row in enumerate(borders) for place in of_row[1:-1]]
    targets = sum(int(labels_BT[row, place] != IGNORE) for row, place in inner)
    refuse_first(
        (
            bool(targets),
            "the first token of a sample is a target of the sample before it",
            f"{targets} of {len(inner)} borders of flattened rows have a label that is not {IGNORE}",
            f"set labels to {IGNORE} where position_ids is 0: labels[position_ids == 0] = {IGNORE}",
        )
    )
