"""The samples inside a collated batch of Hugging Face tensors, and refusals of batches whose loss they would not keep.

Shape legend: B = rows of the batch, T = slots of a row, L = tokens of a sample.

Three forms are read: rows padded on either side under an ``attention_mask``; one flattened row [1, T] whose
``position_ids`` start again at 0 with each sample (TRL's padding-free collator, DataCollatorWithFlattening); and rows
of neither kind, which are whole samples. A causal language model shifts labels by one, so the label of the first token
of a sample is no target; where a batch makes it one (after left padding, or after another sample) it is refused.
Pure functions, on the device of the batch; what ranks refuse may be merged by `refusals.raise_together`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import refuse_first
from ...runtime.attention.pack import IGNORE
from .refusals import (
    refuse_crossing_targets,
    refuse_half_flattened,
    refuse_labels_on_padding,
    refuse_left_padding,
    refuse_other_forms,
)


class Sample(NamedTuple):
    """A sample of a loop's batch, without padding."""

    tokens: Tensor
    """int64 [L]"""
    labels: Tensor
    """int64 [L], not shifted, as Hugging Face models take them; `IGNORE` where there is no loss."""

    @property
    def num_targets(self) -> int:
        """Labels that carry loss; the first one never does."""
        return int((self.labels[1:] != IGNORE).sum())


def split(batch: Mapping[str, Any], *, rotary: bool) -> list[Sample]:
    """The samples of a batch, row by row; views of its tensors.

    Args:
        batch: ``input_ids`` and ``labels`` [B, T], perhaps ``attention_mask`` and ``position_ids`` [B, T],
            ``token_type_ids`` that are all 0, and the borders of flattened rows.
        rotary: positions of the model are relative (`models.is_rotary`). Others are refused with left padding, which
            moves their samples to other positions, and with token types, of which some of them embed type 0.

    Raises:
        EvenloadError: the batch has another key or form, a mask with holes, a row without tokens, or targets that
            single samples do not have; `PaddedLabelsError` for targets on padding.
    """
    refuse_other_forms(batch, rotary=rotary)
    tokens_BT, labels_BT = batch["input_ids"], batch["labels"]
    mask_BT = batch.get("attention_mask")
    if mask_BT is None:
        spans = [(0, tokens_BT.shape[1])] * len(tokens_BT)
    else:
        spans = spans_of(mask_BT)
        refuse_labels_on_padding(labels_BT, mask_BT)
        refuse_left_padding(labels_BT, spans, moves=not rotary and batch.get("position_ids") is None)
    borders = [_borders(batch, row, span) for row, span in enumerate(spans)]
    samples = [
        Sample(tokens_BT[row, first:stop], labels_BT[row, first:stop])
        for row, of_row in enumerate(borders)
        for first, stop in pairwise(of_row)
    ]
    refuse_crossing_targets(labels_BT, borders)
    return samples


def with_all_labels(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch whose labels [B, K] are those of the tokens that a model computes logits of (``logits_to_keep``: how many
    of the last ones, their places, or a mask), with labels [B, T] of all tokens; any other batch as it is."""
    keep, tokens_BT, labels_BK = (batch.get(key) for key in ("logits_to_keep", "input_ids", "labels"))
    if keep is None or not isinstance(tokens_BT, Tensor) or not isinstance(labels_BK, Tensor):
        return batch
    places_T = torch.arange(tokens_BT.shape[-1])
    kept_K = places_T[keep] if isinstance(keep, Tensor) else places_T[-keep:]
    if kept_K.shape != labels_BK.shape[1:] or not bool((kept_K.diff() > 0).all()):
        return batch
    # A token's logits are compared with the label after its own.
    labels_BT = torch.full_like(tokens_BT, IGNORE)
    labels_BT[:, kept_K[:-1] + 1] = labels_BK[:, 1:]
    return {key: value for key, value in batch.items() if key != "logits_to_keep"} | {"labels": labels_BT}


def with_plain_positions(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch whose ``position_ids`` [K, B, T] say the same in every plane, as those of text under multimodal rotary
    embeddings do, with these [B, T]; any other batch as it is."""
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 3 or bool((positions != positions[:1]).any()):
        return batch
    return {**batch, "position_ids": positions[0]}


def reach(batch: Mapping[str, Any]) -> int:
    """Positions that a stock run of the batch has, padding included: some rotary tables follow the largest one."""
    positions_BT = batch.get("position_ids")
    return int(batch["input_ids"].shape[1] if positions_BT is None else positions_BT.max() + 1)


def spans_of(mask_BT: Tensor) -> list[tuple[int, int]]:
    """(first, stop) of the tokens of each row. Raises EvenloadError for rows without tokens and masks with holes."""
    real_BT = mask_BT.bool()
    counts = real_BT.sum(1).tolist()
    firsts = real_BT.int().argmax(1).tolist()
    spans = [(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    holes = [row for row, (first, stop) in enumerate(spans) if not bool(real_BT[row, first:stop].all())]
    refuse_first(
        (
            bool((mask_BT.to(torch.int64) != real_BT).any()),
            "an attention_mask is 1 on tokens and 0 on padding",
            f"values up to {mask_BT.max().item()}",
            "give flattened rows position_ids that start again at 0, and no attention_mask",
        ),
        (
            0 in counts,
            "a sample has no tokens",
            f"row {counts.index(0) if 0 in counts else 0} of the batch: attention_mask is 0 everywhere",
            "leave empty samples out of the dataset",
        ),
        (
            bool(holes),
            "an attention_mask has padding between tokens",
            f"{len(holes)} rows, the first is row {holes[0] if holes else 0}",
            "pad on one side alone: tokens of one row must be neighbours",
        ),
    )
    return spans


def _borders(batch: Mapping[str, Any], row: int, span: tuple[int, int]) -> list[int]:
    """Borders of the samples of a row, which has tokens in `span`."""
    first, stop = span
    positions_BT = batch.get("position_ids")
    if positions_BT is None:
        borders = [first, stop]
    else:
        places_T = torch.arange(stop - first, device=positions_BT.device)
        starts_T = positions_BT[row, first:stop] == 0
        since_T = torch.where(starts_T, places_T, 0).cummax(0).values
        refuse_first(
            (
                not torch.equal(positions_BT[row, first:stop], places_T - since_T),
                "position_ids count up from 0 in each sample",
                f"row {row} begins with {positions_BT[row, first:stop][:8].tolist()}",
                "leave position_ids out of the batch",
            )
        )
        borders = [*(starts_T.nonzero().flatten() + first).tolist(), stop]
        refuse_half_flattened(batch, len(borders) > 2)
    cu_seqlens = batch.get("cu_seq_lens_q")
    refuse_first(
        (
            cu_seqlens is not None and cu_seqlens.flatten().tolist() != borders,
            "cu_seq_lens_q has other borders than position_ids",
            f"{len(borders) - 1} samples by position_ids",
            "give position_ids that start again at 0 with each sample of a flattened row",
        )
    )
    # Collators that pad a flattened row to a multiple write position 0 and no label: tokens without a sample.
    while len(borders) > 2 and borders[-1] - borders[-2] == 1 and int(batch["labels"][row, borders[-2]]) == IGNORE:
        borders.pop()
    return borders
