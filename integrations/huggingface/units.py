"""Units of a loop's batch: rows that stay together, such as the two answers of a pair, cut out of it and reassembled.

    rows of a batch of 3 pairs:  chosen 0, chosen 1, chosen 2, rejected 0, rejected 1, rejected 2
    rows of generated answers:   padding, prompt | completion, padding

Row r of B units belongs to unit r mod B, which is how TRL's collators of pairs lay them out; single rows are units of
one row. A row is one part [T] under ``attention_mask``, or a prompt and a completion, each under a mask of its own.
What a batch has besides rows are values of a unit [B], such as log-probabilities of a reference or an advantage, and
numbers of a whole step [], such as the tokens that divide its loss.

Shape legend: R = rows of a batch, B = its units, T = slots of a part, L = tokens of a part.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.errors import EvenloadError, refuse_first
from ...core.plan.trie import trie_of
from ...core.planning.trees import Branch
from .samples import spans_of

_MASK, _ANSWER, _PROMPT, _TOOLS = "attention_mask", "completion_mask", "prompt_mask", "tool_mask"
_MASKS = ((_MASK,), (_PROMPT, _ANSWER))
"""Masks of the parts of a row, from left to right: one of these."""
_TOKENS = (("input_ids",), ("prompt_ids", "completion_ids"))
"""Their tokens, likewise."""
_OF_PROMPT = "prompt"
"""How the names of what belongs to a prompt begin."""
_IDS = "_ids"
"""How those of tokens end."""
_LOG_PROBS = "logp"
"""What the names of log-probabilities hold."""
_STOCK = "nothing needs to be done: the script runs as it is, without plans"


class BrokenUnitsError(EvenloadError):
    """Rows that make no whole units: what a loss over these would be nobody can say."""


class Answer(NamedTuple):
    """The answer of a row."""

    chosen: bool
    num_tokens: int
    """That are targets."""


def _tokens_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    return _TOKENS[_MASKS.index(_masks_of(row))]


def _prompt_size(row: Mapping[str, Tensor]) -> int:
    """Tokens of a row before its answer, of which there is one at least."""
    size = sum(len(row[key]) for key in _tokens_of(row))
    prompt = len(row[_PROMPT]) if _PROMPT in row else int(row[_ANSWER].argmax()) if _ANSWER in row else 0
    return min(prompt, size - 1)


def _masks_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    return next((masks for masks in _MASKS if all(isinstance(row.get(mask), Tensor) for mask in masks)), ())


@dataclass(frozen=True, eq=False)
class Unit:
    """Rows that stay together, without padding, on the host."""

    rows: tuple[dict[str, Tensor], ...]
    """By key [L] each, of every row; all of a part are as long."""
    values: dict[str, Tensor]
    """By key, one number each."""

    @property
    def lengths(self) -> list[int]:
        """How many tokens each row has."""
        return [sum(len(row[mask]) for mask in _masks_of(row)) for row in self.rows]

    @property
    def branch(self) -> Branch:
        """What its rows compute where these share what they begin with; its trunk is the prompt that all have."""
        if not all(key in row for row in self.rows for key in _tokens_of(row)):  # names of somebody's own
            return Branch(sum(self.lengths), sum(n * (n + 1) // 2 for n in self.lengths))
        rows = [np.concatenate([row[key].numpy() for key in _tokens_of(row)]) for row in self.rows]
        trunk = rows[0][: min(map(_prompt_size, self.rows))]
        alike = all(np.array_equal(row[: len(trunk)], trunk) for row in rows)
        branching = trie_of(rows).branching
        digest = hashlib.blake2b(trunk.tobytes(), digest_size=16).digest()
        return Branch(sum(branching.lengths), branching.pairs, *((len(trunk), digest) if alike and len(trunk) else ()))

    @property
    def sizes(self) -> list[int]:
        """Tokens of the last part of each row."""
        return [len(row[_masks_of(row)[-1]]) for row in self.rows]

    @property
    def is_generated(self) -> bool:
        """Its rows are prompts and completions, each a part of its own."""
        return len(_masks_of(self.rows[0])) > 1

    @property
    def answers(self) -> list[Answer]:
        """The answer of each row: the first of a pair is chosen, and a single one where its ``label`` says so."""
        chosen = bool(self.values["label"]) if "label" in self.values else True
        return [Answer(chosen is not bool(place), _num_targets(row)) for place, row in enumerate(self.rows)]

    def shortened(self, most: int, answer: int = 0) -> Unit:
        """The ends of its rows, each one token shorter than the one before it; a prompt that is a part of its own stays
        whole, and so its completion's log-probabilities hold.

        Args:
            most: tokens of the first row, or of its completion.
            answer: tokens of a row that are its answer, one more in each; 0: those that were.
        """
        is_one = not self.is_generated
        sizes = [max(1 + is_one, most - place) for place in range(len(self.rows))]
        rows = [
            {key: _cut(key, value, size, is_one) for key, value in row.items()}
            for size, row in zip(sizes, self.rows, strict=True)
        ]
        for place, row in enumerate(rows):
            if answer and is_one and _ANSWER in row:
                size = len(row[_ANSWER])
                row[_ANSWER] = (torch.arange(size) >= max(1, size - answer - place)).to(row[_ANSWER])
        part = max(Unit(tuple(rows), {}).sizes) / max(self.sizes)
        # Log-probabilities of whole rows grow with their tokens.
        values = {key: value * part if value.is_floating_point() else value for key, value in self.values.items()}
        return Unit(tuple(rows), values)

    def forked(self, base: Unit, least: int) -> Unit:
        """This unit with rows that begin as the first one of another unit: each has its tokens, but for so many last
        ones at least, one more in each row. Log-probabilities are the other's, too: next to those of other tokens a
        ratio may be infinite, and its gradient no number."""
        rows = []
        for place in range(len(self.rows)):
            row = {key: value.clone() for key, value in base.rows[0].items()}
            last = row[_tokens_of(row)[-1]]
            changed = last[-min(least + place, len(last)) :] if least + place else last[:0]
            changed.copy_(last.max() + last.min() - changed)
            rows.append(row)
        return Unit(tuple(rows), {key: (base if _LOG_PROBS in key else self).values[key] for key in self.values})

    def to_bytes(self) -> Tensor:
        """The bytes that other ranks read it from, uint8."""
        parts = ([{key: value.numpy() for key, value in row.items()} for row in self.rows], self.values)
        return torch.frombuffer(bytearray(pickle.dumps(parts)), dtype=torch.uint8)

    @classmethod
    def of_bytes(cls, content: Tensor) -> Unit:
        rows, values = pickle.loads(content.numpy().tobytes())
        return cls(tuple({key: torch.from_numpy(value) for key, value in row.items()} for row in rows), values)


def _num_targets(row: Mapping[str, Tensor]) -> int:
    answer = row.get(_ANSWER)
    if answer is None:
        return 0
    if _MASK in row:
        return int(answer[1:].sum())
    return int((answer * row[_TOOLS] if _TOOLS in row else answer).sum())


def _cut(key: str, value: Tensor, size: int, is_one: bool) -> Tensor:
    if is_one:
        return value[-size:]
    return value if key.startswith(_OF_PROMPT) else value[:size]


def mask_of(batch: Mapping[str, Tensor]) -> Tensor:
    """1 on the tokens of whole rows [R, T]."""
    return torch.cat([batch[mask] for mask in _masks_of(batch)], 1)


def slots_of(batch: Mapping[str, Tensor]) -> int:
    """Slots of a batch, padding included."""
    return batch["input_ids"].numel() if "input_ids" in batch else mask_of(batch).numel()


class RowPart(NamedTuple):
    """A part of rows, as it lies in the batches of a loop."""

    fills: dict[str, float]
    """By key what padding holds."""
    left: bool | None
    """Padding stands before the tokens; None: no row has any."""

    def merged(self, other: RowPart) -> RowPart:
        sides = {self.left, other.left} - {None}
        return RowPart(other.fills | self.fills, any(sides) if sides else None)


class UnitForm(NamedTuple):
    """How units lie in the batches of a loop."""

    num_rows: int
    """Of a unit."""
    parts: tuple[RowPart, ...]
    """Of a row, from left to right."""
    of_step: frozenset[str] = frozenset()
    """Values that belong to the whole step."""

    def merged(self, other: UnitForm) -> UnitForm:
        """What holds for batches of both: where one has no padding, the other's."""
        pairs = zip(self.parts, other.parts, strict=True)
        return self._replace(parts=tuple(one.merged(same) for one, same in pairs))


def split_units(batch: Mapping[str, Any], num_rows: int, fill: int) -> tuple[list[Unit], UnitForm]:
    """The units of a batch, and how they lie in it.

    Args:
        batch: masks [R, T] of the parts, their tokens, and perhaps other tensors [R, T], [B] and [], on the host.
        num_rows: of a unit.
        fill: the token of padding, where the batch has none.

    Raises EvenloadError for another form, `BrokenUnitsError` for rows that are left over.
    """
    masks = _masks_of(batch)
    refuse_first(
        (
            not masks,
            "evenload regroups units by the masks of their tokens",
            f"a batch without attention_mask or prompt_mask and completion_mask: {', '.join(sorted(map(str, batch)))}",
            "use TRL's own collator, or leave evenload off",
        )
    )
    entries = {key: value for key, value in batch.items() if value is not None}
    num = len(batch[masks[0]])
    count = _num_units(num, num_rows)
    keys: list[list[str]] = [[] for _ in masks]
    for key, value in entries.items():
        place = _place(key, masks)
        if isinstance(value, Tensor) and value.shape == batch[masks[place]].shape:
            keys[place].append(key)
    rest = {key: value for key, value in entries.items() if not any(key in own for own in keys)}
    of_step = frozenset(key for key, value in rest.items() if isinstance(value, Tensor) and value.dim() == 0)
    other = sorted(
        str(key)
        for key, value in rest.items()
        if key not in of_step and not (isinstance(value, Tensor) and len(value) == count and value.numel() == count)
    )
    refuse_first(
        (
            bool(other),
            f"units of {num_rows} rows have tensors of a number for each of their tokens, or one number each",
            f"{num} rows, and {', '.join(other) or 'nothing'} of another shape",
            _STOCK,
        )
    )
    rows: list[dict[str, Tensor]] = [{} for _ in range(num)]
    parts = []
    for mask, own in zip(masks, keys, strict=True):
        spans, part = _part(batch, mask, own, fill)
        parts.append(part)
        for number, span in enumerate(spans):
            rows[number] |= {key: batch[key][number, slice(*span)].clone() for key in own}
    values = [{key: value if key in of_step else value[n].clone() for key, value in rest.items()} for n in range(count)]
    units = [Unit(tuple(rows[number::count]), values[number]) for number in range(count)]
    return units, UnitForm(num_rows, tuple(parts), of_step)


def _place(key: str, masks: tuple[str, ...]) -> int:
    """The part that something of a row belongs to."""
    return int(len(masks) > 1 and not key.startswith(_OF_PROMPT))


def _part(batch: Mapping[str, Any], mask: str, keys: list[str], fill: int) -> tuple[list[tuple[int, int]], RowPart]:
    """Where the tokens of each row are in a part, and how it lies there. A completion that counts nothing, whose mask
    is 0 throughout, keeps its first slot."""
    mask_RT = batch[mask].clone()
    empty_R = mask_RT.sum(1) == 0
    if mask == _ANSWER:
        mask_RT[empty_R, 0] = 1
    spans = spans_of(mask_RT)
    padding_RT = (mask_RT == 0) & ~empty_R[:, None]
    padded = {key: batch[key][padding_RT].unique() for key in keys}
    refuse_first(
        (
            any(len(values) > 1 for values in padded.values()),
            "padding holds one value in each of its tensors",
            ", ".join(f"{key}: {values.tolist()[:4]}" for key, values in padded.items() if len(values) > 1),
            _STOCK,
        )
    )
    fills: dict[str, float] = {key: fill for key in keys if key.endswith(_IDS)}
    fills |= {key: values.item() for key, values in padded.items() if len(values)}
    return spans, RowPart(fills, any(first for first, _ in spans) if padding_RT.any() else None)


def _num_units(rows: int, num_rows: int) -> int:
    """Units in so many rows of a batch. Raises BrokenUnitsError where some are left over."""
    if rows % num_rows:
        raise BrokenUnitsError(
            f"a batch has units with fewer than {num_rows} rows",
            f"{rows} rows of input_ids",
            "have the collate function give each chosen answer its rejected one, chosen answers before rejected ones",
        )
    return rows // num_rows


def batch_of(units: Sequence[Unit], form: UnitForm, device: torch.device, padding: int = 0) -> dict[str, Tensor]:
    """Units as a batch of the loop's own: parts of rows [R, T] padded to the longest and by ``padding`` slots more, and
    values [B] and []."""
    rows = [unit.rows[place] for place in range(form.num_rows) for unit in units]
    masks = _masks_of(rows[0])
    batch = {}
    for place, (mask, part) in enumerate(zip(masks, form.parts, strict=True)):
        most = max(len(row[mask]) for row in rows) + padding
        # Between a prompt and its completion padding would hide the token that predicts the first one of this.
        left = mask == _PROMPT if part.left is None else part.left
        for key in (key for key in rows[0] if _place(key, masks) == place):
            batch_RT = rows[0][key].new_full((len(rows), most), part.fills.get(key, 0))
            for own_T, row in zip(batch_RT, rows, strict=True):
                first = most - len(row[key]) if left else 0
                own_T[first : first + len(row[key])] = row[key]
            batch[key] = batch_RT
    of_units = units[0].values.keys() - form.of_step
    batch |= {key: torch.stack([unit.values[key] for unit in units]) for key in of_units}
    batch |= {key: units[0].values[key] for key in form.of_step}
    return {key: value.to(device) for key, value in batch.items()}
