"""The tensors of a batch that belong to its rows besides tokens and labels: cut out row by row, and reassembled.

Which row has which entries is measured on the batch: a row has as many entries as its tokens stand for.

    token   [B, T]          a number for each token: mm_token_type_ids
    piece   [sum of sizes]  entries of unlike sizes one after the other; a grid [E, 3] holds the sizes: image_grid_thw
    entry   [E, ...]        one for each picture or sound, over all rows: pixel_values of LLaVA, input_features, grids
    row     [B, N, ...]     those of a row, padded with empty ones: pixel_values of SmolVLM and Idefics

Tokens that stand for entries are those that the model's config names (image_token_id, audio_token_id, ...). Entries of
a row are told apart by grids, else by runs of such tokens, else all of a batch stand for equally many tokens.

Shape legend: B = rows of the batch, T = slots of a row, E = entries of all rows, N = entries of a row, L = tokens of a
sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....core.errors import EvenloadError
from ....runtime.attention.pack import Pack
from ...huggingface.refusals import KEYS
from ...huggingface.samples import spans_of

Kind = Literal["token", "piece", "entry", "row"]

_ENTRY: Kind = "entry"

Parts = dict[str, Tensor]
"""What a sample has of each key of the batch, on the host: [L] of its tokens, else [entries, ...] or [pieces, ...]."""

_STANDS_FOR = re.compile(r"(?<!pad)(?<!bos)(?<!eos)_token_(id|index)$")


class PartKey(NamedTuple):
    """How one entry of the batch lies in it."""

    name: str
    kind: Kind
    group: str
    """The entry that leads those of one modality: what has any of it has all of them. Empty: of tokens."""


PartForm = tuple[PartKey, ...]
"""How all of them do, by name."""


class ReadParts(NamedTuple):
    """What a batch has besides tokens and labels."""

    form: PartForm
    of_rows: Sequence[Parts] = ()

    def of_samples(self, count: int) -> Sequence[Parts]:
        """The parts of each sample of the batch, which has ``count``. Raises EvenloadError where rows hold several."""
        if self.form and len(self.of_rows) != count:
            raise EvenloadError(
                "rows with pictures hold several samples",
                f"{len(self.of_rows)} rows, {count} samples, and {', '.join(key.name for key in self.form)}",
                "give every sample a row of its own (TRL: padding_free=False, packing=False)",
            )
        return self.of_rows or [{}] * count


NO_PARTS = ReadParts(())


def split_parts(batch: Mapping[str, Any], config: Any) -> ReadParts:
    """What each row has besides tokens and labels.

    Args:
        batch: on the host.
        config: of the model.

    Raises EvenloadError where entries and the tokens that stand for them disagree.
    """
    tokens_BT, mask_BT = batch["input_ids"], batch.get("attention_mask")
    extra = {key: value for key, value in batch.items() if key not in KEYS and isinstance(value, Tensor)}
    stands_for = tokens_standing_for(config)
    of_tokens = {key for key, value in extra.items() if value.shape == tokens_BT.shape}
    if not extra or not stands_for:
        return NO_PARTS
    spans = [(0, tokens_BT.shape[1])] * len(tokens_BT) if mask_BT is None else spans_of(mask_BT)
    rows = [tokens_BT[row, first:stop].tolist() for row, (first, stop) in enumerate(spans)]
    form = {key: PartKey(key, "token", "") for key in of_tokens}
    borders: dict[str, list[int]] = {}
    for key, kind, group, counts in _counted({k: v for k, v in extra.items() if k not in of_tokens}, rows, stands_for):
        form[key], borders[key] = PartKey(key, kind, group), [0, *accumulate(counts)]

    def of_row(key: str, row: int) -> Tensor:
        if form[key].kind == "token":
            return extra[key][row, slice(*spans[row])].clone()
        first, stop = borders[key][row : row + 2]
        return (extra[key][row, : stop - first] if form[key].kind == "row" else extra[key][first:stop]).clone()

    cut = [{key: of_row(key, row) for key in form} for row in range(len(rows))]
    own = [{key: one for key, one in parts.items() if len(one) or form[key].kind == "token"} for parts in cut]
    return ReadParts(tuple(sorted(form.values())), own)


def tokens_standing_for(config: Any) -> dict[int, str]:
    """The tokens that a model's config names for pictures, sounds and their borders, and their names."""
    names = [name for name in vars(config) if _STANDS_FOR.search(name)]
    return {value: name for name in names if isinstance(value := getattr(config, name), int)}


def _counted(
    extra: Mapping[str, Tensor], rows: Sequence[Sequence[int]], stands_for: Mapping[int, str]
) -> Iterator[tuple[str, Kind, str, list[int]]]:
    """Kind, group and number of entries or pieces in each row, of all tensors that are not of tokens."""
    left = dict(extra)
    for grid_key, grid in extra.items():
        if grid.is_floating_point() or grid.dim() != 2 or grid.shape[1] != 3:
            continue
        sizes = grid.prod(1).tolist()
        pieces = [key for key, value in left.items() if value.is_floating_point() and len(value) == sum(sizes)]
        if pieces:
            counts = _agreeing(grid_key, rows, stands_for, lambda wanted, runs, s=sizes: _walked(s, wanted))
            ends = [0, *accumulate(counts)]
            yield grid_key, "entry", grid_key, counts
            for key in pieces:
                yield key, "piece", grid_key, [sum(sizes[a:b]) for a, b in pairwise(ends)]
            left = {key: value for key, value in left.items() if key not in (grid_key, *pieces)}
            beside = [key for key, value in left.items() if len(value) == len(grid) and value.dim() == 1]
            for key in beside:
                yield key, "entry", grid_key, counts
                del left[key]
    while left:
        leader = max(left, key=lambda key: left[key].numel())
        value, kind = left[leader], _ENTRY
        entries, shape = len(value), value.shape[:1]
        if value.dim() >= 5 and len(value) == len(rows):  # pictures of each row, after them empty ones
            there = (value.flatten(2) != 0).any(2).sum(1).tolist()
            if any(_runs(rows, token) == there for token in stands_for):
                kind, shape, counts = "row", value.shape[:2], there
        if kind == _ENTRY:
            counts = _agreeing(leader, rows, stands_for, lambda wanted, runs, e=entries: _even(e, wanted, runs))
        alike = [key for key, one in left.items() if one.shape[: len(shape)] == shape]
        for key in [key for key in alike if _modality(key) == _modality(leader)]:
            yield key, kind, leader, counts
            del left[key]


def _modality(name: str) -> str:
    """Where shapes leave a choice: what the name of an entry speaks of."""
    return "video" if "video" in name else "audio" if "audio" in name or "feature" in name else "image"


def _agreeing(name: str, rows: Sequence[Sequence[int]], stands_for: Mapping[int, str], fit: Any) -> list[int]:
    """Entries of each row by the token that agrees with their number, one of many before one of few. Raises
    EvenloadError where none does."""
    own = [token for token, called in stands_for.items() if _modality(name) in called] or [*stands_for]
    tokens = sorted(own, key=lambda token: (-sum(row.count(token) for row in rows), token))
    for token in tokens:
        wanted = [row.count(token) for row in rows]
        if sum(wanted) and (counts := fit(wanted, _runs(rows, token))) is not None:
            return list(counts)
    most = [row.count(tokens[0]) for row in rows]
    raise EvenloadError(
        "pictures of a batch and the tokens that stand for them disagree",
        f"{name} does not fit rows with {', '.join(map(str, most[:8]))} such tokens",
        "give each row the tokens of its own pictures, and none cut off: longer samples need a larger max_length",
    )


def _runs(rows: Sequence[Sequence[int]], token: int) -> list[int]:
    """How often neighbours of a token begin in each row."""
    return [sum(is_token for is_token, _ in groupby(row, key=lambda one: one == token)) for row in rows]


def _walked(sizes: Sequence[int], wanted: Sequence[int]) -> list[int] | None:
    """Entries of each row, which stand for tokens in proportion to their sizes; None where they do not."""
    if sum(sizes) % sum(wanted):
        return None
    per_token, ends = sum(sizes) // sum(wanted), [0, *accumulate(sizes)]
    borders = [per_token * tokens for tokens in accumulate(wanted, initial=0)]
    if any(border not in ends for border in borders):
        return None
    return [ends.index(stop) - ends.index(first) for first, stop in pairwise(borders)]


def _even(entries: int, wanted: Sequence[int], runs: Sequence[int]) -> Sequence[int] | None:
    """Entries of each row, of which each is a run of tokens, or all stand for equally many; None where neither is."""
    if sum(runs) == entries:
        return runs
    each, rest = divmod(sum(wanted), entries)
    return None if rest or any(tokens % each for tokens in wanted) else [tokens // each for tokens in wanted]


def joined(parts: Sequence[Parts], pack: Pack, form: PartForm, *, rows: bool, left: bool = False) -> dict[str, Tensor]:
    """Parts of a micro-batch's samples as entries of a batch, on the device of its pack.

    Args:
        parts: of each slice of the pack, in their order.
        rows: the pack is a batch of padded rows; else one row.
        left: rows are padded on the left.
    """
    batch: dict[str, Tensor] = {}
    for key, kind, _ in form:
        own = [one.get(key) for one in parts]
        there = [one for one in own if one is not None]
        if not there:
            continue
        if kind == "token":
            flat_T = there[0].new_zeros(pack.num_padded_tokens)
            for one, piece, (first, end) in zip(own, pack.slices, pairwise(pack.segments), strict=False):
                first = end - piece.length if rows and left else first
                if one is not None:
                    flat_T[first : first + piece.length] = one[: piece.length]
            batch[key] = flat_T.view(len(parts) if rows else 1, -1)
        elif kind == "row" and rows:
            most = max(map(len, there))
            empty = there[0][:0]
            batch[key] = torch.stack([_filled(empty if one is None else one, most) for one in own])
        else:
            whole = torch.cat(there)
            batch[key] = whole[None] if kind == "row" else whole
    return {key: value.to(pack.tokens_T.device) for key, value in batch.items()}


def _filled(entries: Tensor, count: int) -> Tensor:
    """So many entries, empty ones after those that there are."""
    return pad(entries, (0, 0) * (entries.dim() - 1) + (0, count - len(entries)))
