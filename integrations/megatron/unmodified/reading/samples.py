"""Samples of a training loop that we cannot edit: taken out of its batches, moved between ranks, laid out as packs.

A batch is a mapping of `FIELDS`, each [b, s], and what its form (`forms.form`) has besides: a mask, or the borders of
samples that lie side by side in a row. The last token with loss ends a sample: under a causal mask no token with loss
sees a later one, so what follows adds neither loss nor gradient and is left out. Labels and loss masks stay the
sample's own: in a row of several, the last label of one is whatever its loader put there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .....core.errors import EvenloadError
from .....core.plan.step_plan import MicroBatch
from .....runtime.attention.copy_rows import copy_rows
from .....runtime.attention.pack import IGNORE, Borders, Pack, Slices, lay_out_pack
from .....runtime.attention.prefix import PrefixStore
from .....runtime.world.exchange import exchange_bytes
from .....runtime.world.plane import Plane
from .borders import runs_of
from .form import FIELDS, MASK, Form

PLAIN = Form({})
"""Of batches that have nothing besides `FIELDS`."""

Sample = dict[str, Tensor]
"""`FIELDS` of one sample, each [L]."""


@dataclass(frozen=True, eq=False)
class PackForm:
    """What all packs of a step have in common."""

    like: Sample
    """Any sample, for dtypes and device."""
    batches: Form = PLAIN
    """Of the user's batches."""
    multiple: int = 1
    """A pack is padded, after its last slice, to a multiple of this many tokens."""
    device: torch.device | None = None
    """Of the borders and positions that the model needs; None: where the samples are."""


@dataclass(frozen=True, eq=False)
class UserPack:
    """A micro-batch in the user's own form, and the pack that the model needs to know."""

    fields: dict[str, Any]
    """`FIELDS`, each [1, T], and what the form of the user's batches has besides."""
    pack: Pack
    num_counted: float
    """The sum of its loss mask."""


def split(batch: Any, form: Form) -> list[Sample]:
    """The samples of one batch of a form, cut to their true lengths; those without loss are left out of a row of
    several, unless nothing else is there. Raises EvenloadError for another structure."""
    runs = runs_of(batch)
    counted = batch["loss_mask"] != 0
    ends = (counted * torch.arange(1, counted.shape[1] + 1, device=counted.device)).cummax(dim=1).values
    rows, stops = [run.row for run in runs], [run.start + max(1, run.length) - 1 for run in runs]
    lengths = [end - run.start for end, run in zip(ends[rows, stops].tolist(), runs, strict=True)]
    if not form.has_borders:
        lengths = [max(1, length) for length in lengths]
        _refuse_mask(batch.get(MASK), lengths)
    elif max(lengths) < 1:
        lengths[0] = 1
    return [
        {name: batch[name][run.row, run.start : run.start + length] for name in FIELDS}
        for run, length in zip(runs, lengths, strict=True)
        if length > 0
    ]


def exchange(
    own: Mapping[int, Sample],
    source: Sequence[int],
    targets: Sequence[set[int]],
    lengths: Sequence[int],
    group: Any,
    *,
    like: Sample,
) -> dict[int, Sample]:
    """The samples that this rank computes, by their place in the global batch, on the device that `own` lies on.

    Args:
        own: what this rank has read, by place.
        source: rank in ``group`` that has read the sample at each place.
        targets: ranks in ``group`` that compute some of it.
        lengths: of the sample at each place [tokens].
        like: any sample, for dtypes and device.
    """
    width = sum(like[name].element_size() for name in FIELDS)
    packed = {i: pack_bytes(sample) for i, sample in own.items()}
    parts = exchange_bytes(packed, source, targets, [width * length for length in lengths], group)
    return {i: unpack_bytes(part, lengths[i], like) for i, part in parts.items()}


def lay_out(
    micro_batch: MicroBatch,
    prefix: PrefixStore | None = None,
    *,
    samples: Mapping[int, Sample],
    form: PackForm,
    plane: Plane | None = None,
) -> UserPack:
    """The slices of a micro-batch side by side, or what this rank has of a shared one; none gives a dummy of one token
    without loss.

    The fields of a part of a sample are those parts of its fields: its labels are shifted already, its positions and
    those of the pack begin where it does.

    Args:
        prefix: keys and values of the samples of the step that are cut; None where none is.
        plane: over which ranks share micro-batches; None where the plan shares none.
    """
    like, rows = form.like, dict[str, Tensor]()

    def fill(slices: Slices, segments: Borders, borders: Borders) -> dict[str, Any]:
        parts = [{name: samples[s.sequence][name][s.start : s.stop] for name in FIELDS} for s in slices]
        parts = parts or [{name: like[name].new_zeros(1) for name in FIELDS}]
        positions = [np.arange(s.start, s.stop) for s in slices] or [np.zeros(1, dtype=np.int64)]
        if padding := segments[-1] - sum(map(len, positions)):
            # The last position is repeated, so that a table of learned positions is never overrun.
            parts.append({name: like[name].new_zeros(padding) for name in FIELDS})
            parts[-1]["position_ids"] += parts[-2]["position_ids"][-1]
            positions.append(np.repeat(positions[-1][-1:], padding))
        rows.update({name: torch.cat([part[name] for part in parts]) for name in FIELDS})
        target_T = rows["loss_mask"] != 0
        planned: dict[str, Any] = {
            "positions_T": np.concatenate(positions),
            "cu_seqlens": np.array(borders, dtype=np.int32),
        }
        return {
            "tokens_T": rows["tokens"],
            "labels_T": torch.where(target_T, rows["labels"], IGNORE),
            **copy_rows(planned, form.device or like["tokens"].device),
            "num_targets": int(target_T.sum()),
        }

    # What a stock trainer would pad to is nothing to a loop that gets packs.
    unpadded = micro_batch._replace(pad_to=0)
    pack = lay_out_pack(unpadded, fill, prefix, plane=plane, multiples=(1, form.multiple))
    fields: dict[str, Any] = {name: row[None] for name, row in rows.items()}
    return UserPack(fields | form.batches.beside(pack, rows["tokens"]), pack, float(rows["loss_mask"].sum()))


def one_batch(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The data iterator of one micro-batch: gives its fields once."""
    yield fields
    raise EvenloadError(
        "forward_step takes more than one batch from its data iterator",
        "a second next(data_iterator) in one call",
        "take one batch per call, as Megatron's schedules expect",
    )


def pack_bytes(sample: Sample) -> Tensor:
    """The fields of a sample one after the other, uint8, on the host."""
    return torch.cat([sample[name].contiguous().view(torch.uint8) for name in FIELDS]).cpu()


def unpack_bytes(data: Tensor, length: int, like: Sample) -> Sample:
    """The sample of ``length`` tokens in its `pack_bytes`, with the dtypes and on the device of ``like``."""
    parts = torch.split(data, [length * like[name].element_size() for name in FIELDS])
    # A clone starts at an aligned address; a view into the middle of the buffer may not.
    return {
        name: part.clone().view(like[name].dtype).to(like[name].device)
        for name, part in zip(FIELDS, parts, strict=True)
    }


def _refuse_mask(mask: Any, lengths: list[int]) -> None:
    """Raise unless the mask, True where attention is forbidden, looks causal: packs are causal inside each sample.
    Looked at: its first row and column, which a mask that starts anew inside a sample, a window and a prefix change."""
    if mask is None:
        return
    if mask.dim() == 2:  # says where there are tokens, as Megatron-Bridge's collators do
        odd = any(not row[:n].all() for row, n in zip(mask, lengths, strict=True))
    else:
        rows = [mask[row if mask.shape[0] > 1 else 0, 0] for row in range(len(lengths))]
        odd = any(row[:n, 0].any() or not row[0, 1:n].all() for row, n in zip(rows, lengths, strict=True))
    if odd:
        raise EvenloadError(
            "the attention mask is not the causal one",
            "a sample whose tokens do not all see its first token, or whose first token sees others",
            "switch reset_attention_mask off, or disable evenload's plugins",
        )
