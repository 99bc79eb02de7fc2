"""Padded rows of a loop's own kind: how its batches pad, and a micro-batch of whole samples as such a batch.

Shape legend: B = rows, T = slots of a row, L = tokens of a sample, D = labels of a sample.

An encoder-decoder has labels of a length of their own, which the model does not shift. Such a sample [2, max(L, D + 1)]
has `ABSENT` where it has no token, and its labels one place to the right: so a target is a label after the first place
in every kind of sample, and a pack's labels are those that the loss looks at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.errors import EvenloadError, refuse_first
from ...runtime.attention.pack import IGNORE, Pack
from .samples import Sample, spans_of

ABSENT = -1
"""In the place of a token, where a sample has more labels than tokens."""

_BESIDE = ("attention_mask", "position_ids", "token_type_ids", "decoder_input_ids")
"""What a batch may have besides tokens and labels."""


class PaddedForm(NamedTuple):
    """How the rows of a loop's batches look."""

    keys: frozenset[str]
    """What they have besides ``input_ids`` and ``labels``."""
    left: bool
    """Padding stands before the tokens."""
    fill: int
    """The token of padding."""
    start: int | None
    """Of an encoder-decoder, whose labels have a length of their own, the token before the first label; else None."""

    @classmethod
    def of(cls, batch: Mapping[str, Any], config: Any) -> PaddedForm:
        """The form of one batch; of one without padding the right side and the model's padding token."""
        mask_BT, tokens_BT = batch.get("attention_mask"), batch["input_ids"]
        keys = frozenset(key for key in _BESIDE if batch.get(key) is not None)
        own = getattr(config, "pad_token_id", None)
        left, fill = False, own if isinstance(own, int) and own >= 0 else 0
        if mask_BT is not None and mask_BT.shape == tokens_BT.shape:
            padding_BT = mask_BT == 0
            left = bool(padding_BT[:, 0].any())
            fill = int(tokens_BT[padding_BT][0]) if bool(padding_BT.any()) else fill
        return cls(keys, left, fill, _start(config))


def rows_of(pack: Pack, form: PaddedForm) -> dict[str, Any]:
    """A pack of whole samples as a batch of padded rows [B, T]; a dummy is one row of one token without a target."""
    count = max(1, len(pack.slices))
    tokens_BT, shifted_BT = pack.tokens_T.view(count, -1), pack.labels_T.view(count, -1)
    real_BT = (pack.sequence_ids_T >= 0).view(count, -1) & (tokens_BT != ABSENT)
    real_BT = real_BT if pack.slices else torch.ones_like(real_BT)
    if form.start is not None:
        length, targets = int(real_BT.sum(1).max()), int((shifted_BT != IGNORE).int().sum(0).count_nonzero())
        tokens_BT, real_BT, labels_BT = tokens_BT[:, :length], real_BT[:, :length], shifted_BT[:, : max(1, targets)]
    else:
        labels_BT = pad(shifted_BT[:, :-1], (1, 0), value=IGNORE)
    rows = {
        "input_ids": tokens_BT.where(real_BT, form.fill),
        "labels": labels_BT,
        "attention_mask": real_BT.long(),
        "position_ids": torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT),
        "token_type_ids": torch.zeros_like(tokens_BT),
        "decoder_input_ids": _behind_start(labels_BT, form.start or 0, form.fill),
    }
    if form.left:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        from_BT = (places_T - (~real_BT).sum(1, keepdim=True)) % tokens_BT.shape[1]
        moved = {key: value.gather(1, from_BT) for key, value in rows.items() if key != "position_ids"}
        rows |= moved | {"position_ids": from_BT.where(moved["attention_mask"].bool(), 0)}
    wanted = (*form.keys, "input_ids", "labels")
    # As a collator makes them: some models take views.
    return {key: value.contiguous() for key, value in rows.items() if key in wanted}


def split_pairs(batch: Mapping[str, Any], config: Any) -> list[Sample]:
    """The samples of an encoder-decoder's batch, row by row.

    Args:
        batch: ``input_ids`` [B, T] and ``labels`` [B, D], perhaps ``attention_mask`` [B, T] and ``decoder_input_ids``
            [B, D] that are what the model makes of the labels.

    Raises EvenloadError for another form.
    """
    known = ("input_ids", "labels", "attention_mask", "decoder_input_ids")
    other = sorted(str(key) for key in batch if key not in known and batch[key] is not None)
    missing = [key for key in known[:2] if not isinstance(batch.get(key), Tensor)]
    refuse_first(
        (
            bool(other or missing),
            "evenload regroups batches of input_ids and labels",
            f"a batch without {', '.join(missing)}" if missing else f"a batch with {', '.join(other)}",
            f"give {', '.join(known)} and nothing else from the collate function, or leave evenload off",
        )
    )
    tokens_BT, labels_BD, of_batch_BD = batch["input_ids"], batch["labels"], batch.get("decoder_input_ids")
    made_BD = _behind_start(labels_BD, _start(config) or 0, getattr(config, "pad_token_id", None) or 0)
    if of_batch_BD is not None and not torch.equal(of_batch_BD, made_BD):
        raise EvenloadError(
            "decoder_input_ids are not the labels, one place to the right",
            f"a batch of decoder_input_ids {list(of_batch_BD.shape)}",
            "leave decoder_input_ids out of the batch: the model makes them of its labels",
        )
    mask_BT = batch.get("attention_mask")
    spans = [(0, tokens_BT.shape[1])] * len(tokens_BT) if mask_BT is None else spans_of(mask_BT)
    if any(first for first, _ in spans):
        raise EvenloadError(
            "left padding of an encoder", f"{len(spans)} rows", "pad on the right: tokenizer.padding_side = 'right'"
        )
    samples = []
    for row, (_, stop) in enumerate(spans):
        targets = _last(labels_BD[row]) + 1
        size = max(stop, targets + 1)
        tokens = pad(tokens_BT[row, :stop], (0, size - stop), value=ABSENT)
        labels = pad(labels_BD[row, :targets], (1, size - targets - 1), value=IGNORE)
        samples.append(Sample(tokens, labels))
    return samples


def _last(labels_D: Tensor) -> int:
    """The place of the last target; -1 where there is none."""
    places = (labels_D != IGNORE).nonzero()
    return int(places.max()) if len(places) else -1


def _start(config: Any) -> int | None:
    """The token with which an encoder-decoder begins an answer; None: it is none."""
    if not getattr(config, "is_encoder_decoder", False):
        return None
    return getattr(config, "decoder_start_token_id", None) or 0


def _behind_start(labels_BD: Tensor, start: int, fill: int) -> Tensor:
    """What a decoder reads to predict these labels."""
    shifted_BD = pad(labels_BD[:, :-1], (1, 0), value=start)
    return shifted_BD.where(shifted_BD != IGNORE, fill)
