"""The batches of a training call, as every rank of a model copy needs them, whoever has a data iterator.

Megatron-LM's `pretrain_gpt.py` gives an iterator to the first tensor-parallel rank of the first and of the last stage
of a pipeline; its `get_batch` broadcasts a batch of one fixed shape inside the tensor-parallel group, and stages in
between see none. A plan is made before the first micro-batch and packs have shapes of their own, so all batches of a
call are broadcast before it:

    with an iterator            has taken as many batches as the stock schedule would
    tensor-parallel peers       get the samples of the rank of their stage that has some
    stages without any          get the lengths; their samples are zeros, since such a stage embeds and scores nothing

Where every rank has an iterator, nothing is sent.

What is wrong with a batch, one rank alone may see: its peers, which would wait for it, are told along with the heads,
and other data-parallel ranks along with the lengths (`Batches.trouble`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from .....core.errors import EvenloadError
from .....runtime.world.agreement import everyone, on_host
from .context_parallel import refuse_form, targets_of_columns
from .form import FIELDS, Form, form_of
from .rows import holds_rows
from .samples import PLAIN, Sample, pack_bytes, split, unpack_bytes
from .taken import Taken, of_one


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches that one data-parallel rank brings to a training call."""

    lengths: list[list[int]]
    """Of each sample [tokens], by micro-batch."""
    targets: list[list[float]]
    """The sum of each micro-batch's loss mask, on each context-parallel rank of the stock loop."""
    dtypes: dict[str, torch.dtype]
    """Of a sample's fields."""
    size: int
    """Samples of a micro-batch."""
    slots: int
    """Places of input in all of them on a rank of the stock loop, padding among them."""
    row: int
    """Places that the stock loop has of each sample."""
    form: Form
    """Of the loop's batches."""
    several: bool
    """A row of them holds several samples."""
    samples: Sequence[Sequence[Sample]] = ()
    """By micro-batch of the loop; all else of the batches is known to ranks without an iterator, too."""
    trouble: EvenloadError | None = None
    """Why this model copy's batches cannot be planned; nothing else of them is known then."""


class BatchSource:
    """Where a rank's batches come from; asked in every training call. Collective when it is made and when it is asked,
    over the ranks of one copy of the model."""

    def __init__(self, has_iterator: bool) -> None:
        group = parallel_state.get_model_parallel_group()
        self._has_iterator = has_iterator
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        ends = everyone((self._has_iterator, first, last), group)
        _refuse_missing(ends)
        holders = [has for has, _, _ in ends]
        self.all_have = all(holders)
        """Each rank of this copy of the model has an iterator."""
        ranks = dist.get_process_group_ranks(group)
        peers = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
        having = [rank for rank, has in zip(ranks, holders, strict=True) if has]
        self._first = holders.index(True)
        self._of_stage = next((rank for rank in having if rank in peers), None)
        # Whether somebody of this stage waits for samples: the holder sends to all of them, or to none.
        self._sends = self._of_stage is not None and not set(peers) <= set(having)

    def broadcast_batches(self, taken: Taken) -> Batches:
        """The batches of a call, of which this rank has ``taken`` its own; of another form, they are in trouble. Raises
        EvenloadError where an iterator came or went."""
        if bool(taken) != self._has_iterator:
            raise EvenloadError(
                "a rank has a data iterator in some training calls, and none in others",
                f"{'one' if taken else 'none'}, other than in the first call",
                "give each rank its iterator in every call, or in none",
            )
        samples: Sequence[Sequence[Sample]] = ()
        head: Batches | EvenloadError | None = None
        try:
            samples, head = (samples, None) if (own := of_one(taken)) is None else _read(own)
        except EvenloadError as error:
            head = error
        except Exception as error:  # values that nobody has thought of are no reason to end a script
            what, do = "a batch cannot be read as samples", "disable evenload's plugins"
            head = EvenloadError(what, f"{type(error).__name__}: {error}", do)
        heads = [head] if self.all_have else everyone(head, parallel_state.get_model_parallel_group())
        if trouble := next((one for one in heads if isinstance(one, EvenloadError)), None):
            return Batches([], [], {}, 0, 0, 0, PLAIN, False, trouble=trouble)
        head = heads[0 if self.all_have else self._first]
        assert isinstance(head, Batches)
        if self._of_stage is None:
            samples = [[_zeros(length, head) for length in one] for one in head.lengths]
        elif self._sends:
            samples = _broadcast(samples, head, self._of_stage)
        return replace(head, samples=samples)


def _refuse_missing(ends: Sequence[tuple[bool, bool, bool]]) -> None:
    """Raise EvenloadError unless a rank of the first stage and one of the last have an iterator. ``ends``: whether each
    rank of a copy of the model has one, whether it is of the first pipeline stage, and of the last."""
    first, last = any(has and first for has, first, _ in ends), any(has and last for has, _, last in ends)
    if first and last:
        return
    what, whose = "no rank of a copy of the model has a data iterator", "tensor- and pipeline-parallel ranks"
    if any(has for has, _, _ in ends):
        stage, unknown = ("last", "labels and loss masks") if first else ("first", "tokens")
        what, whose = (
            f"no rank of the {stage} pipeline stage has a data iterator",
            f"of its ranks, so that {unknown} are not known there",
        )
    raise EvenloadError(
        what,
        f"data_iterator=None on all {whose}",
        "give one to the first tensor-parallel rank of the first and last pipeline stage, as Megatron-LM does",
    )


def _read(batches: Sequence[Any]) -> tuple[Sequence[Sequence[Sample]], Batches]:
    if holds_rows(batches[0]):
        raise EvenloadError(
            "TensorDicts are given to some ranks of a copy of the model, and not to all",
            "data_iterator=None on a tensor- or pipeline-parallel rank",
            "give each rank an iterator over the same rows, as verl does, or disable evenload's plugins",
        )
    forms, samples = zip(*((form := form_of(batch), split(batch, form)) for batch in batches), strict=True)
    dtypes = {name: samples[0][0][name].dtype for name in FIELDS}
    ranks = parallel_state.get_context_parallel_world_size()
    targets = [targets_of_columns(batch["loss_mask"], ranks) for batch in batches]
    lengths = [[len(sample["tokens"]) for sample in one] for one in samples]
    row = batches[0]["tokens"].shape[1]
    if ranks > 1 and forms[0].has_borders:
        refuse_form("the borders of samples in a row")
    slots = sum(batch["tokens"].numel() for batch in batches)
    several = sum(map(len, samples)) > sum(len(batch["tokens"]) for batch in batches)
    return samples, Batches(lengths, targets, dtypes, len(samples[0]), slots // ranks, row, forms[0], several)


def _broadcast(samples: Sequence[Sequence[Sample]], head: Batches, source: int) -> Sequence[Sequence[Sample]]:
    """The samples of the tensor-parallel rank ``source`` (its rank in the world), on all of them."""
    group = on_host(parallel_state.get_tensor_model_parallel_group())
    lengths = [length for one in head.lengths for length in one]
    width = sum(dtype.itemsize for dtype in head.dtypes.values())
    if dist.get_rank() == source:
        flat = torch.cat([pack_bytes(sample) for one in samples for sample in one])
        dist.broadcast(flat, source, group=group)
        return samples
    flat = torch.empty(width * sum(lengths), dtype=torch.uint8)
    dist.broadcast(flat, source, group=group)
    like = {name: torch.empty(0, dtype=dtype) for name, dtype in head.dtypes.items()}
    parts = iter(torch.split(flat, [width * length for length in lengths]))
    return [[unpack_bytes(next(parts), length, like) for length in one] for one in head.lengths]


def _zeros(length: int, head: Batches) -> Sample:
    return {name: torch.zeros(length, dtype=dtype) for name, dtype in head.dtypes.items()}
