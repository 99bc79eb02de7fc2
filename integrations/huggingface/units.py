"""Units of a loop's batch: rows that stay together, such as the two answers of a pair, cut out of it and put together.

    rows of a batch of 3 pairs:  chosen 0, chosen 1, chosen 2, rejected 0, rejected 1, rejected 2

Row r of B units belongs to unit r mod B, which is how TRL's collators of pairs lay them out; single rows are units of
one row. What a batch has beside rows [R, T] are values of a unit [B], such as log-probabilities of a reference.

Shape legend: R = rows of a batch, B = its units, T = slots of a row, L = tokens of a row.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import EvenloadError, refuse_first
from ...runtime.attention.pack import IGNORE
from .samples import spans_of

_TOKENS, _MASK, _ANSWER = "input_ids", "attention_mask", "completion_mask"


class BrokenUnitsError(EvenloadError):
    """Rows that make no whole units: what a loss over these would be nobody can say."""


class Answer(NamedTuple):
    """The answer of a row."""

    chosen: bool
    num_tokens: int
    """That are targets."""


@dataclass(frozen=True, eq=False)
class Unit:
    """Rows that stay together, without padding, on the host."""

    rows: tuple[dict[str, Tensor], ...]
    """By key [L] each, of every row; all of a row are as long."""
    values: dict[str, Tensor]
    """By key, one number each."""

    @property
    def length(self) -> int:
        """Tokens of its longest row."""
        return max(len(row[_TOKENS]) for row in self.rows)

    @property
    def answers(self) -> list[Answer]:
        """The answer of each row: the first of a pair is chosen, and a single one where its ``label`` says so."""
        masks = [row.get(_ANSWER) for row in self.rows]
        sizes = [0 if mask is None else int(mask[1:].sum()) for mask in masks]
        chosen = bool(self.values["label"]) if "label" in self.values else True
        return [Answer(chosen is not bool(place), size) for place, size in enumerate(sizes)]

    @property
    def longest(self) -> Any:
        """What stands for it in a pack: tokens, and as many of no target, int64 [2, L]."""
        tokens_L = max((row[_TOKENS] for row in self.rows), key=len)
        return torch.stack([tokens_L, torch.full_like(tokens_L, IGNORE)]).numpy()

    def shortened(self, most: int, answer: int = 0) -> Unit:
        """The ends of its rows, each one token shorter than the one before it.

        Args:
            most: tokens of the first row.
            answer: tokens of a row that are its answer, one more in each; 0: those that were.
        """
        sizes = [max(2, most - place) for place in range(len(self.rows))]
        rows = [{key: value[-size:] for key, value in row.items()} for size, row in zip(sizes, self.rows, strict=True)]
        for place, row in enumerate(rows):
            if answer and _ANSWER in row:
                size = len(row[_ANSWER])
                row[_ANSWER] = (torch.arange(size) >= max(1, size - answer - place)).to(row[_ANSWER])
        part = max(len(row[_TOKENS]) for row in rows) / self.length
        # Log-probabilities of whole rows grow with their tokens.
        values = {key: value * part if value.is_floating_point() else value for key, value in self.values.items()}
        return Unit(tuple(rows), values)

    def to_bytes(self) -> Tensor:
        """The bytes that other ranks read it from, uint8."""
        parts = ([{key: value.numpy() for key, value in row.items()} for row in self.rows], self.values)
        return torch.frombuffer(bytearray(pickle.dumps(parts)), dtype=torch.uint8)

    @classmethod
    def of_bytes(cls, content: Tensor) -> Unit:
        rows, values = pickle.loads(content.numpy().tobytes())
        return cls(tuple({key: torch.from_numpy(value) for key, value in row.items()} for row in rows), values)


class UnitForm(NamedTuple):
    """How units lie in the batches of a loop."""

    num_rows: int
    """Of a unit."""
    left: bool = False
    """Padding stands before the tokens."""
    fill: int = 0
    """The token of padding."""


def split_units(batch: Mapping[str, Any], num_rows: int, fill: int) -> tuple[list[Unit], UnitForm]:
    """The units of a batch, and how they lie in it.

    Args:
        batch: ``input_ids`` and ``attention_mask`` [R, T] and perhaps other tensors [R, T] and [B], on the host.
        num_rows: of a unit.
        fill: the token of padding, where the batch has none.

    Raises EvenloadError for another form, `BrokenUnitsError` for rows that are left over.
    """
    mask_RT = batch.get(_MASK)
    missing = [key for key in (_TOKENS, _MASK) if not isinstance(batch.get(key), Tensor)]
    refuse_first(
        (
            bool(missing),
            "evenload regroups units by their input_ids and attention_mask",
            f"a batch without {', '.join(missing)}: it has {', '.join(sorted(map(str, batch)))}",
            "use TRL's own collator, or leave evenload off",
        )
    )
    assert isinstance(mask_RT, Tensor)
    count = _num_units(len(mask_RT), num_rows)
    entries = {key: value for key, value in batch.items() if value is not None}
    of_rows = {key for key, value in entries.items() if isinstance(value, Tensor) and value.shape == mask_RT.shape}
    of_units = {key for key, value in entries.items() if isinstance(value, Tensor) and value.shape == (count,)}
    other = sorted(str(key) for key in entries if key not in of_rows | of_units)
    refuse_first(
        (
            bool(other) or _TOKENS not in of_rows,
            f"units of {num_rows} rows have tensors of a number for each of their tokens, or one number each",
            f"{len(mask_RT)} rows, and {', '.join(other) or 'nothing'} of another shape",
            "nothing needs to be done: the script runs as it is, without plans",
        )
    )
    spans = spans_of(mask_RT)
    padding_RT = mask_RT == 0
    padded = {key: batch[key][padding_RT].unique() for key in of_rows}
    refuse_first(
        (
            any(len(values) > 1 for values in padded.values())
            or any(bool(padded[key].any()) for key in of_rows - {_TOKENS}),
            "padding holds one token, and zeros in all else",
            ", ".join(f"{key}: {values.tolist()[:4]}" for key, values in padded.items()),
            "nothing needs to be done: the script runs as it is, without plans",
        )
    )
    fills = padded[_TOKENS].tolist()
    units = [
        Unit(
            tuple(
                {key: batch[key][row, slice(*spans[row])].clone() for key in of_rows}
                for row in range(number, len(mask_RT), count)
            ),
            {key: batch[key][number].clone() for key in of_units - of_rows},
        )
        for number in range(count)
    ]
    return units, UnitForm(num_rows, any(first for first, _ in spans), fills[0] if fills else fill)


def _num_units(rows: int, num_rows: int) -> int:
    """Units in so many rows of a batch. Raises BrokenUnitsError where some are left over."""
    if rows % num_rows:
        raise BrokenUnitsError(
            f"a batch has units with fewer than {num_rows} rows",
            f"{rows} rows of input_ids",
            "have the collate function give each chosen answer its rejected one, chosen answers before rejected ones",
        )
    return rows // num_rows


def batch_of(units: Sequence[Unit], form: UnitForm, device: torch.device, slots: int = 0) -> dict[str, Tensor]:
    """Units as a batch of the loop's own: rows [R, T] padded to the longest or to ``slots``, and values [B]."""
    rows = [unit.rows[place] for place in range(form.num_rows) for unit in units]
    most = max(slots, *(unit.length for unit in units))
    batch = {}
    for key in rows[0]:
        batch_RT = rows[0][key].new_full((len(rows), most), form.fill if key == _TOKENS else 0)
        for own_T, row in zip(batch_RT, rows, strict=True):
            first = most - len(row[key]) if form.left else 0
            own_T[first : first + len(row[key])] = row[key]
        batch[key] = batch_RT
    batch |= {key: torch.stack([unit.values[key] for unit in units]) for key in units[0].values}
    return {key: value.to(device) for key, value in batch.items()}
