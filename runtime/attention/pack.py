"""Turn a planned micro-batch into the tensors that a model reads: one row of tokens, no sequence touching another.

Shape legend: T = slots of the pack (padding included), S = segments (one per slice).

Positions of a slice start at `slice.start`, so that rotary embeddings see the place inside the sequence and not the
place inside the pack. The label of a token is the next token of the *same* sequence, also at the end of a slice that is
continued elsewhere; the last token of a sequence has none.

Padding sits after its slice. Where a trainer needs segments or packs of certain multiples, attention leaves it alone;
`MicroBatch.pad_to` is the padding of stock trainers and is computed as they compute it, kept from the tokens before it
by the causal mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.step_plan import MicroBatch, Slice
from ...core.plan.trie import Branching
from ..world.plane import Plane
from .copy_rows import copy_rows
from .kv_cache import CachedRows
from .prefix import PrefixStore
from .sharing.shared import PiecesOf, Shared, token_layout
from .sparse import SparsePass, SparseSegment

IGNORE = -100
"""Label of a slot that carries no loss: what torch's cross_entropy ignores by default."""

PADDING = -1
"""Sequence id of a slot that belongs to no sequence."""

Tokens = npt.NDArray[Any]
Slices = tuple[Slice, ...]
Borders = tuple[int, ...]
TokensOf = Callable[[int], Tokens]
"""Token ids [length], integers, of a sequence of the global batch, by its index in the batch."""


class SegmentRun(NamedTuple):
    """Neighbouring segments that one attention call takes: all of whole sequences, or all of sequences that are cut, or
    one that leaves blocks of keys out."""

    lengths: tuple[int, ...]
    """Tokens of each segment."""
    segments: tuple[int, ...]
    """Their borders if they lay side by side."""
    cu_seqlens: Tensor
    """int32; the same."""
    cut: Shared | None
    """Those of sequences that are cut, as what one rank alone shares; None for whole ones."""
    sparse: SparseSegment | None = None
    """How the one leaves blocks of keys out."""


class SlotSpan(NamedTuple):
    """Some slots of a pack in a row."""

    size: int
    run: int | None
    """Place of their run in `Pack.layout`; None: padding, which attention leaves alone."""


@dataclass(frozen=True, eq=False)
class Pack:
    """One micro-batch on one rank, ready to be run."""

    tokens_T: Tensor
    """int64; 0 on padding."""
    labels_T: Tensor
    """int64; `IGNORE` at the last token of a sequence, on padding and in a dummy."""
    positions_T: Tensor
    """int64; place inside the sequence. Padding repeats the last one, so none lies beyond its sequence."""
    cu_seqlens: Tensor
    """int32 [S + 1]; borders of the segments if they lay side by side without padding: what attention computes."""
    segments: tuple[int, ...]
    """Borders of the segments in the pack, each with the padding after it, as Python integers."""
    max_seqlen: int
    """Tokens of the longest segment, without padding."""
    num_targets: int
    """Slots that carry loss."""
    slices: tuple[Slice, ...]
    padding: tuple[int, ...] = ()
    """Slots after each segment that attention leaves alone; empty where there are none."""
    prefix: PrefixStore | None = None
    """Keys and values of the sequences of the step that are cut; None where none is."""
    shared: Shared | None = None
    """How ranks share the micro-batch, `slices` being what this one has of it; None where one rank runs all."""
    weights_T: Tensor | None = None
    """float64; weights of the targets, 0 where no loss is carried. None: each is 1."""
    branching: Branching | None = None
    """How its segments, without padding, continue each other; None: each begins a sequence, or what `slices` says."""
    cached: CachedRows | None = None
    """Where all its sequences keep keys and values from one forward to the next; None where they do not."""
    sparse: SparsePass | None = None
    """What a pass without gradients leaves blocks of keys out by; None: attention is dense."""

    @classmethod
    def of(cls, lengths: Sequence[int], segments: tuple[int, ...], **fields: Any) -> Pack:
        """A pack whose segments hold so many tokens and then padding."""
        padding = tuple(end - first - n for (first, end), n in zip(pairwise(segments), lengths, strict=True))
        return cls(
            segments=segments,
            max_seqlen=max(lengths),
            padding=padding if any(padding) else (),
            **fields,
        )

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return self.segments[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment, without padding."""
        slots = [end - first for first, end in pairwise(self.segments)]
        return tuple(n - p for n, p in zip(slots, self.padding or [0] * len(slots), strict=True))

    @property
    def longest(self) -> int:
        """Tokens that the last one of some segment sees, but for what a `PrefixStore` or a cache has."""
        return self.branching.longest if self.branching else self.max_seqlen

    @cached_property
    def cu_seqlens_padded(self) -> Tensor:
        """`segments` as int32 [S + 1] on the pack's device."""
        if not self.padding:
            return self.cu_seqlens
        return self._on_device(self.segments)

    @cached_property
    def real_slots(self) -> Tensor:
        """int64 [N]; the slots that are no padding."""
        slots = [np.arange(first, first + n) for first, n in zip(self.segments, self.lengths, strict=False)]
        return copy_rows({"slots": np.concatenate(slots)}, self.tokens_T.device)["slots"]

    @cached_property
    def sequence_ids_T(self) -> Tensor:
        """int64; the sequence of each slot by its place in the global batch, `PADDING` on padding and in a dummy."""
        ids = np.full(self.num_padded_tokens, PADDING, dtype=np.int64)
        for piece, first in zip(self.slices, self.segments, strict=False):
            ids[first : first + piece.length] = piece.sequence
        return copy_rows({"ids": ids}, self.tokens_T.device)["ids"]

    @cached_property
    def layout(self) -> tuple[tuple[SegmentRun, ...], tuple[SlotSpan, ...]]:
        """The attention calls of this pack, and its slots from left to right: neighbours belong to different calls, or
        one of them is padding. Raises EvenloadError for a slice whose prefix is nowhere."""
        slots = [end - first for first, end in pairwise(self.segments)]
        pieces = [self._cut_piece(place) for place in range(len(slots))]
        lengths = [piece.length if piece else n for piece, n in zip(pieces, self.lengths, strict=True)]
        sparse: dict[int | None, SparseSegment] = {}
        for place, one in enumerate(self.slices):
            if self.sparse and (segment := self.sparse.segment(one, self.prefix)):
                sparse[place] = segment
        runs: list[SegmentRun] = []
        spans: list[SlotSpan] = []
        kinds = groupby(range(len(slots)), key=lambda i: (pieces[i] is not None, i if i in sparse else None))
        for (_, alone), group in kinds:
            places = list(group)
            for i in places:
                spans += [SlotSpan(lengths[i], len(runs)), SlotSpan(slots[i] - lengths[i], None)]
            of_run = tuple(lengths[i] for i in places)
            borders = tuple(accumulate(of_run, initial=0))
            cut = tuple(piece for i in places if (piece := pieces[i]))
            cut_ones = Shared.alone(cut, self.prefix, borders) if cut and self.prefix else None
            runs.append(SegmentRun(of_run, borders, self._on_device(borders), cut_ones, sparse.get(alone)))
        solid = groupby((span for span in spans if span.size), key=lambda span: span.run)
        return tuple(runs), tuple(SlotSpan(sum(span.size for span in row), run) for run, row in solid)

    def _on_device(self, borders: Borders) -> Tensor:
        """Borders of some of the segments as int32, without another copy where they are those of all."""
        if borders == tuple(accumulate(self.lengths, initial=0)):
            return self.cu_seqlens
        return copy_rows({"borders": np.array(borders, dtype=np.int32)}, self.cu_seqlens.device)["borders"]

    def _cut_piece(self, place: int) -> Slice | None:
        """The slice in a segment, where its sequence is cut."""
        piece = self.slices[place] if place < len(self.slices) else None
        if piece is None or (self.prefix is not None and piece.sequence in self.prefix):
            return piece
        if piece.start:
            raise EvenloadError(
                "a slice has no prefix to attend to",
                f"tokens {piece.start} to {piece.stop} of sequence {piece.sequence}",
                "give build_pack the PrefixStore of the plan",
            )
        return None


def padded_borders(lengths: Iterable[int], segment_multiple: int = 1, pack_multiple: int = 1) -> tuple[int, ...]:
    """Borders [S + 1] of segments of these lengths, each padded to a multiple, and the pack too.

    The pack is filled up after its last segment, with whole segment multiples.

    Args:
        segment_multiple: what the slots of each segment are divisible by, such as 2 * cp.
        pack_multiple: what the slots of the pack are divisible by, such as tp where sequence parallelism shares them.
    """
    borders = list(accumulate((n + -n % segment_multiple for n in lengths), initial=0))
    borders[-1] += -borders[-1] % math.lcm(segment_multiple, pack_multiple)
    return tuple(borders)


def build_pack(
    micro_batch: MicroBatch,
    tokens_of: TokensOf,
    device: torch.device | str = "cpu",
    prefix: PrefixStore | None = None,
    *,
    plane: Plane | None = None,
    labels_of: TokensOf | None = None,
    weights_of: Callable[[int], npt.NDArray[np.float64]] | None = None,
    trunks: bool = False,
    sparse: SparsePass | None = None,
    segment_multiple: int = 1,
    pack_multiple: int = 1,
) -> Pack:
    """Load the tokens of `micro_batch` and lay them out.

    Args:
        micro_batch: what to run; without slices it is a dummy and becomes one token of no weight.
        tokens_of: gives the token ids of a whole sample [L] by its place in the global batch. Only the wanted part of
            it is read, so a memory map costs no more than the slice.
        device: where the tensors end up.
        prefix: the store of the step, one for all its packs on this rank and pipeline stage.
        plane: where this rank has its part of micro-batches that ranks share.
        labels_of: gives what a token counts as where it is a target, `IGNORE` where it carries no loss [L]; None: every
            token is the target of the token before it.
        weights_of: gives the weight of each token where it is a target [L]; None: each is 1.
        trunks: slices that begin late continue others of the micro-batch (`StepPlan.trunks`).
        sparse: what a pass without gradients leaves blocks of keys out by.
        segment_multiple, pack_multiple: see `padded_borders`.

    Raises:
        EvenloadError: a sample does not begin as the one that it continues, or it holds fewer tokens than were planned,
            or ranks share the micro-batch and there is no plane, or a cp_comm that only predictions know.
    """

    def fill(slices: Slices, segments: Borders, borders: Borders) -> dict[str, Any]:
        rows = _fill(slices, segments, tokens_of, labels_of or tokens_of)
        target_T = rows["labels_T"] != IGNORE
        weights_T = np.where(target_T, of_targets(slices, segments, weights_of) if weights_of else 1.0, 0.0)
        num_targets = int(np.count_nonzero(target_T))
        for piece, slots in slots_before(slices, segments) if trunks else ():
            num_targets += _add_trunk(piece, slots, rows, weights_T, tokens_of, labels_of or tokens_of, weights_of)
        if (weights_T != 1)[rows["labels_T"] != IGNORE].any():
            rows["weights_T"] = weights_T
        rows["cu_seqlens"] = np.array(borders, dtype=np.int32)
        return {**copy_rows(rows, device), "num_targets": num_targets}

    multiples = segment_multiple, pack_multiple
    pack = lay_out_pack(micro_batch, fill, prefix, plane=plane, multiples=multiples)
    branches = trunks and any(piece.start for piece in pack.slices)
    if branches or sparse:
        pack = replace(pack, branching=Branching.of(pack.slices) if branches else None, sparse=sparse)
    return pack


def lay_out_pack(
    micro_batch: MicroBatch,
    fill: Callable[[Slices, Borders, Borders], dict[str, Any]],
    prefix: PrefixStore | None = None,
    *,
    plane: Plane | None = None,
    multiples: tuple[int, int] = (1, 1),
) -> Pack:
    """The pack of a micro-batch, or of what this rank has of a shared one; `build_pack` has the other arguments.

    Args:
        fill: gives tokens, labels, positions, borders and the number of targets of slices, by their names in `Pack`;
            the slots of each lie between two of the first borders, without padding between two of the second, and one
            slot is a dummy's.
        multiples: of segments and of the pack; see `padded_borders`.
    """
    pieces_of = _pieces_of_ranks(micro_batch, plane)
    slices = pieces_of(plane.rank) if plane and pieces_of else micro_batch.slices
    lengths = tuple(micro_batch.pad_to or s.length for s in slices) or (1,)
    segments = padded_borders(lengths, multiples[0], math.lcm(multiples[1], micro_batch.round_to or 1))
    shared = None
    if plane and pieces_of:
        shared = Shared(plane, micro_batch, pieces_of, prefix, segments[: len(slices)], segments[-1])
    fields = fill(slices, segments, tuple(accumulate(lengths, initial=0)))
    return Pack.of(lengths, segments, slices=slices, prefix=prefix, shared=shared, **fields)


def _pieces_of_ranks(micro_batch: MicroBatch, plane: Plane | None) -> PiecesOf | None:
    """What each rank has of a micro-batch that ranks share; None where one rank runs all of it."""
    if len(micro_batch.ranks) <= 1:
        return None
    if plane is None or not micro_batch.cp_comm:
        raise EvenloadError(
            f"ranks {micro_batch.ranks} share a micro-batch" + ("" if plane else ", and this host gives them no plane"),
            f"engine {micro_batch.cp_comm or 'none: the static context parallelism that only predictions know'}",
            "run plans of the mesh plugin" if plane else "use a host that shares micro-batches, or disable mesh",
        )
    return token_layout(micro_batch, plane)


def _fill(slices: Slices, segments: Borders, tokens_of: TokensOf, labels_of: TokensOf) -> dict[str, npt.NDArray[Any]]:
    """int64 [T] each: tokens, labels and positions of slices that begin at these slots."""
    tokens_T = np.zeros(segments[-1], dtype=np.int64)
    labels_T = np.full(segments[-1], IGNORE, dtype=np.int64)
    positions_T = np.zeros(segments[-1], dtype=np.int64)
    for piece, (first, end) in zip(slices, pairwise(segments), strict=False):
        sample = tokens_of(piece.sequence)
        if len(sample) < piece.stop:
            raise EvenloadError(
                f"sample {piece.sequence} of the batch is shorter than planned",
                f"{len(sample)} tokens, the plan reads tokens {piece.start} to {piece.stop}",
                "plan with the lengths of the data that is loaded; rebuild the length file if the data changed",
            )
        last = first + piece.length
        assert last <= end, f"{piece} does not fit into {end - first} padded slots"
        targets = labels_of(piece.sequence)[piece.start + 1 : piece.stop + 1]
        tokens_T[first:last] = sample[piece.start : piece.stop]
        labels_T[first : first + len(targets)] = targets
        positions_T[first:last] = np.arange(piece.start, piece.stop)
        positions_T[last:end] = piece.stop - 1
    return {"tokens_T": tokens_T, "labels_T": labels_T, "positions_T": positions_T}


def slots_before(slices: Slices, segments: Borders) -> Iterator[tuple[Slice, npt.NDArray[np.int64]]]:
    """The slices that continue others of a pack, each with the slots of the tokens before it."""
    open_: list[tuple[Slice, npt.NDArray[np.int64]]] = []
    for piece, first in zip(slices, segments, strict=False):
        while open_ and open_[-1][0].start >= piece.start:
            open_.pop()
        before = open_[-1][1][: piece.start] if open_ else np.zeros(0, dtype=np.int64)
        if len(before) < piece.start:
            return  # `Pack.layout` says so
        if piece.start:
            yield piece, before
        open_.append((piece, np.concatenate([before, np.arange(first, first + piece.length)])))


def _add_trunk(
    piece: Slice,
    slots: npt.NDArray[np.int64],
    rows: Mapping[str, npt.NDArray[Any]],
    weights_T: npt.NDArray[np.float64],
    tokens_of: TokensOf,
    labels_of: TokensOf,
    weights_of: Callable[[int], npt.NDArray[np.float64]] | None,
) -> int:
    """Let the slots before a slice have the targets of its sequence, too, and their weights; how many there are. Raises
    EvenloadError where its tokens or targets are others."""
    stop = piece.start
    tokens, labels = tokens_of(piece.sequence)[:stop], labels_of(piece.sequence)[1 : stop + 1]
    known, target = rows["labels_T"][slots], labels != IGNORE
    differ = (tokens != rows["tokens_T"][slots]) | (target & (known != IGNORE) & (labels != known))
    if differ.any():
        raise EvenloadError(
            f"sample {piece.sequence} of the batch does not begin as the one that it continues",
            f"token {int(differ.argmax())} of the first {stop} is another, or predicts another",
            "restore the data that the run began with, or set plugins.packing.trees=false",
        )
    rows["labels_T"][slots] = np.where(target, labels, known)
    weights_T[slots] += np.where(target, 1.0 if weights_of is None else weights_of(piece.sequence)[1 : stop + 1], 0.0)
    return int(np.count_nonzero(target))


def of_targets(slices: Slices, segments: Borders, values_of: Callable[[int], Tokens]) -> npt.NDArray[np.float64]:
    """What belongs to the labels that a pack has of slices [T]: their weights, or other values of a sequence's tokens
    [L]."""
    values_T = np.zeros(segments[-1], dtype=np.float64)
    for piece, first in zip(slices, segments, strict=False):
        values = values_of(piece.sequence)[piece.start + 1 : piece.stop + 1]
        values_T[first : first + len(values)] = values
    return values_T


def slice_losses(losses_T: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
    """The loss of each slice of a pack, so that samples can be weighted anew; differentiable. Token losses are
    multiplied by the weights of the pack, where it has any.

    The losses and counts of the slices of one sequence add up to those of the sample, over packs and over ranks.

    Args:
        losses_T: loss of each token, whatever its label.

    Returns:
        For each of `pack.slices` the sum of its token losses, in float32 at least, and the number of its targets.
    """
    sizes = [end - first for first, end in pairwise(pack.segments)]
    target_T = pack.labels_T != IGNORE
    counted_T = torch.where(target_T, losses_T.to(torch.promote_types(losses_T.dtype, torch.float32)), 0.0)
    if pack.weights_T is not None:
        counted_T = counted_T * pack.weights_T
    sums = torch.stack([part.sum() for part in torch.split(counted_T, sizes)])
    counts = torch.stack([part.sum() for part in torch.split(target_T, sizes)])
    return sums[: len(pack.slices)], counts[: len(pack.slices)]
