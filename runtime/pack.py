"""Turn a planned micro-batch into the tensors that a model reads: one row of tokens, no sequence touching another.

Shape legend: T = slots of the pack (padding included), S = segments (one per slice).

Positions of a slice start at `slice.start`, so that rotary embeddings see the place inside the sequence and not the
place inside the pack. The label of a token is the next token of the *same* sequence, also at the end of a slice that is
continued elsewhere; the last token of a sequence has none. Padding sits at the end of its own segment, where causal
attention keeps it from every real token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core.errors import EvenloadError
from ..core.workload import MicroBatch, Sequence, Slice
from .prefix import PrefixStore

IGNORE = -100
"""Label of a slot that carries no loss: what torch's cross_entropy ignores by default."""

Tokens = npt.NDArray[Any]
TokensOf = Callable[[int], Tokens]


@dataclass(frozen=True, eq=False)
class Pack:
    """One micro-batch on one rank, ready to be run."""

    tokens_T: torch.Tensor
    """int64; 0 on padding."""
    labels_T: torch.Tensor
    """int64; `IGNORE` at the last token of a sequence, on padding and in a dummy."""
    positions_T: torch.Tensor
    """int64; place inside the sequence. Padding repeats the last one, so none lies beyond its sequence."""
    cu_seqlens: torch.Tensor
    """int32 [S + 1]; borders of the segments in the pack."""
    segments: tuple[int, ...]
    """`cu_seqlens` as Python integers, so that nobody has to wait for a device to read them."""
    max_seqlen: int
    """Slots of the longest segment."""
    num_targets: int
    """Slots that carry loss."""
    slices: tuple[Slice, ...]
    prefix: PrefixStore | None = None
    """Keys and values of the sequences of the step that are cut; None where none is."""

    @property
    def num_slots(self) -> int:
        """Tokens that are computed, padding included."""
        return self.segments[-1]


def count_targets(sequences: Iterable[Sequence]) -> int:
    """Target tokens of a global batch: the one divisor of every token loss, on every rank and in every micro-batch."""
    return sum(max(0, s.length - 1) for s in sequences)


def build_pack(
    micro_batch: MicroBatch,
    tokens_of: TokensOf,
    device: torch.device | str = "cpu",
    prefix: PrefixStore | None = None,
) -> Pack:
    """Load the tokens of `micro_batch` and lay them out.

    Args:
        micro_batch: what to run; without slices it is a dummy and becomes one token of no weight.
        tokens_of: gives the token ids of a whole sample [L] by its place in the global batch. Only the wanted part of
            it is read, so a memory map costs no more than the slice.
        device: where the tensors end up.
        prefix: the store of the step, one for all its packs on this rank and pipeline stage.

    Raises:
        EvenloadError: a sample holds fewer tokens than were planned.
    """
    lengths = [micro_batch.pad_to or s.length for s in micro_batch.slices] or [1]
    borders = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=borders[1:])
    segments = tuple(borders.tolist())

    tokens_T = np.zeros(segments[-1], dtype=np.int64)
    labels_T = np.full(segments[-1], IGNORE, dtype=np.int64)
    positions_T = np.zeros(segments[-1], dtype=np.int64)
    for piece, (first, end) in zip(micro_batch.slices, pairwise(segments), strict=False):
        sample = tokens_of(piece.sequence)
        if len(sample) < piece.stop:
            raise EvenloadError(
                f"sample {piece.sequence} of the batch is shorter than planned",
                f"{len(sample)} tokens, the plan reads tokens {piece.start} to {piece.stop}",
                "plan with the lengths of the data that is loaded; rebuild the length file if the data changed",
            )
        last = first + piece.length
        assert last <= end, f"{piece} does not fit into {end - first} padded slots"
        targets = sample[piece.start + 1 : piece.stop + 1]
        tokens_T[first:last] = sample[piece.start : piece.stop]
        labels_T[first : first + len(targets)] = targets
        positions_T[first:last] = np.arange(piece.start, piece.stop)
        positions_T[last:end] = piece.stop - 1

    return Pack(
        tokens_T=torch.from_numpy(tokens_T).to(device),
        labels_T=torch.from_numpy(labels_T).to(device),
        positions_T=torch.from_numpy(positions_T).to(device),
        cu_seqlens=torch.from_numpy(borders).to(device),
        segments=segments,
        max_seqlen=max(lengths),
        num_targets=int(np.count_nonzero(labels_T != IGNORE)),
        slices=micro_batch.slices,
        prefix=prefix,
    )
