"""The parts of one optimizer step: told to all ranks, sent to where their sample is computed, and put into its batch.

Ranks run the towers in step: under ZeRO and FSDP all of them gather a tower's weights and sum its gradients at once. So
a micro-batch in which no sample has a picture gets the smallest one of the first step, with its own tokens, none of
which is a target: it gives no gradient.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core.errors import EvenloadError
from ....core.plan.step_plan import MicroBatch, Slice, StepPlan
from ....core.plan.token_layout import ranks_of_samples
from ....runtime.attention.pack import Pack, build_pack
from ....runtime.world.agreement import rank_and_size
from ....runtime.world.exchange import exchange_bytes
from ...unmodified.planned_loop import GlobalBatch
from .parts import PartForm, Parts, ReadParts, joined
from .work import Values, values_of

Content = Sequence[Sequence[Tensor]]
"""Parts of each sample of each batch as bytes."""


class BroughtParts(NamedTuple):
    """What a rank tells the others of the parts of its samples, by batch and sample."""

    form: PartForm
    shapes: frozenset[tuple[str, str]]
    """Type and shape of an entry."""
    sizes: list[list[int]]
    """[bytes]"""
    values: list[list[list[Values]]]

    @classmethod
    def of(cls, batches: Sequence[ReadParts], content: Content) -> BroughtParts:
        form = tuple(sorted({key for own in batches for key in own.form}))
        lengths = {key.name for key in form if key.kind == "token"}
        shapes = {
            (key, f"{one.dtype}{[] if key in lengths else [*one.shape[1:]]}")
            for own in batches
            for parts in own.of_rows
            for key, one in parts.items()
        }
        sizes = [[len(one) for one in own] for own in content]
        return cls(
            form, frozenset(shapes), sizes, [[values_of(parts, form) for parts in own.of_rows] for own in batches]
        )


@dataclass(frozen=True, eq=False)
class StepParts:
    """The parts of all samples of one step."""

    form: PartForm
    own: Mapping[int, Parts]
    """Of this rank's samples, by number."""
    content: Mapping[int, Tensor]
    """The same as bytes."""
    sizes: Sequence[int]
    """Of all samples [bytes]."""
    values: Sequence[Sequence[Values]]
    """Of all samples."""
    fault: EvenloadError | None
    """Why they cannot stand in one batch, the same on all ranks."""

    @classmethod
    def of(
        cls,
        of_ranks: Sequence[BroughtParts],
        samples: GlobalBatch[Any],
        own: Sequence[Sequence[Parts]],
        content: Content,
    ) -> StepParts | None:
        """None where no sample of any rank has a part.

        Args:
            samples: the numbers of all.
            own, content: of this rank's batches.
        """
        form = tuple(sorted({key for one in of_ranks for key in one.form}))
        if not form:
            return None
        shapes = sorted({shape for one in of_ranks for shape in one.shapes})
        kinds = [(key.name, f"({key.kind})") for key in form]
        unlike = {one for pairs in (shapes, kinds) for (one, _), (other, _) in pairwise(pairs) if one == other}
        fault = EvenloadError(
            "pictures of one step have unlike shapes, so they cannot stand in one batch",
            ", ".join(f"{key} {shape}" for key, shape in (*shapes, *kinds) if key in unlike),
            "have the processor give all of one size, as it does with tiles (do_image_splitting) and patches",
        )
        places, rank = samples.places, rank_and_size()[0]
        numbered = {i: (place, row) for i, (other, place, row) in enumerate(places) if other == rank}
        return cls(
            form,
            {i: own[place][row] for i, (place, row) in numbered.items()},
            {i: content[place][row] for i, (place, row) in numbered.items()},
            [of_ranks[other].sizes[place][row] for other, place, row in places],
            [of_ranks[other].values[place][row] for other, place, row in places],
            fault if unlike else None,
        )

    def exchange(self, plan: StepPlan, samples: GlobalBatch[Any]) -> dict[int, Parts]:
        """The parts of the samples that this rank computes. Collective."""
        source, rank = samples.source, rank_and_size()[0]
        # What stays where it is need not be copied.
        targets = [{*ranks} - {sender} for ranks, sender in zip(ranks_of_samples(plan), source, strict=True)]
        leaving = {i: content for i, content in self.content.items() if targets[i]}
        coming = exchange_bytes(leaving, source, targets, self.sizes)
        return {**self.own, **{i: from_bytes(content) for i, content in coming.items() if source[i] != rank}}


def to_bytes(parts: Parts) -> Tensor:
    """Parts as uint8, to be sent; of nothing, nothing."""
    content = bytearray(pickle.dumps(parts)) if parts else bytearray()
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def from_bytes(content: Tensor) -> Parts:
    """What `to_bytes` was made of."""
    parts: Parts = pickle.loads(content.numpy().tobytes()) if len(content) else {}
    return parts


class FillerSample(NamedTuple):
    """A short sample without a target, for micro-batches that have nothing of a modality."""

    group: str
    sample: Any
    """Tokens and labels, int64 [2, L]."""
    parts: Parts


class PartsOfRank:
    """The parts of the samples that a rank computes in one step.

    Args:
        model: the Hugging Face model.
        samples: tokens and labels [2, L] of these samples, by number.
        parts: theirs.
        first_filler: numbers of ``fillers`` begin here; below 0 their tokens are masked, as padding is.
        round_to: slots of a pack are a multiple.
    """

    def __init__(
        self,
        model: Any,
        form: PartForm,
        samples: Mapping[int, Any],
        parts: Mapping[int, Parts],
        fillers: Sequence[FillerSample] = (),
        first_filler: int = 0,
        round_to: int = 1,
    ) -> None:
        numbered = {first_filler + place: filler for place, filler in enumerate(fillers)}
        self._form, self._fillers = form, numbered
        self._round_to = round_to
        self._samples = {**samples, **{number: filler.sample for number, filler in numbered.items()}}
        self._parts = {**parts, **{number: filler.parts for number, filler in numbered.items()}}
        inner = getattr(model, "model", model)
        self._positions: Any = getattr(inner, "compute_3d_position_ids", None)

    def filled(self, pack: Pack, *, rows: bool) -> Pack:
        """The pack with a filler sample for each modality that it has nothing of."""
        there = {key for piece in pack.slices for key in self._parts[piece.sequence]}
        missing = [number for number, filler in self._fillers.items() if filler.group not in there]
        if not missing:
            return pack
        pieces = (*pack.slices, *(Slice(number, 0, self._samples[number].shape[1]) for number in missing))
        pad_to = max(piece.length for piece in pieces) if rows and len(pieces) > 1 else 0
        round_to = 0 if rows or self._round_to == 1 else self._round_to
        micro_batch = MicroBatch(pieces, (rank_and_size()[0],), pad_to, round_to=round_to)
        of, device = self._samples, pack.tokens_T.device
        return build_pack(micro_batch, lambda i: of[i][0], device, labels_of=lambda i: of[i][1])

    def inputs_of(self, pack: Pack, *, rows: bool, left: bool = False) -> dict[str, Tensor]:
        """What the model's call is given besides tokens and labels."""
        own = [self._parts[piece.sequence] for piece in pack.slices]
        inputs = joined(own, pack, self._form, rows=rows, left=left)
        return inputs if rows or self._positions is None else inputs | self._positions_in(pack)

    def _positions_in(self, pack: Pack) -> dict[str, Tensor]:
        """Positions [3, 1, T] of a pack, those of each sample as the model computes them of it alone."""
        positions_31T = pack.positions_T.cpu().expand(3, 1, -1).clone()
        for piece, first in zip(pack.slices, pack.segments, strict=False):
            tokens_1L = torch.as_tensor(self._samples[piece.sequence][0])[None]
            words = _alone(self._parts[piece.sequence], self._form, piece.length)
            words |= {"input_ids": tokens_1L, "attention_mask": torch.ones_like(tokens_1L)}
            taken = inspect.signature(self._positions).parameters.values()
            wanted = [one.name for one in taken if one.name in words or one.default is one.empty]
            try:
                own_31L = self._positions(**{key: words.get(key) for key in wanted})
            except Exception as error:  # of code that nobody here has seen
                what = "the model does not compute positions of a sample with pictures by itself"
                raise EvenloadError(what, f"{type(error).__name__}: {error}", "leave evenload off") from error
            if own_31L is not None:
                positions_31T[..., first : first + piece.length] = own_31L
        return {"position_ids": positions_31T.to(pack.tokens_T.device)}


def _alone(parts: Parts, form: PartForm, length: int) -> dict[str, Tensor]:
    """Parts of a sample of so many tokens as those of a batch of its own."""
    kinds = {key.name: key.kind for key in form}
    of_tokens = {key: one[None, :length] for key, one in parts.items() if kinds[key] == "token"}
    return parts | {key: one[None] for key, one in parts.items() if kinds[key] == "row"} | of_tokens
