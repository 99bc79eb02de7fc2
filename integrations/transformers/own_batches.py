"""A script's own batches against the same samples as a planned step has them: what two short samples cannot show.

A factor by the number of rows, a model or a loss that treats far places otherwise, a table of positions that ends: the
losses of all batches of this rank, forward only, are held against those of its samples in packs as long as the plan's
(or in padded rows). Every rank runs as many forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...core.errors import EvenloadError
from ...core.plan.step_plan import MicroBatch, Slice
from ...runtime.attention.pack import Pack, build_pack
from ...runtime.world.agreement import everyone
from .planning import StepBatch
from .proof import STOCK

_OF_TOKENS = 50.0
"""Times smaller than that of a token's logits is the rounding of a loss of many tokens."""


def packs_of(batch: StepBatch, rank: int, most: int, device: torch.device, *, rows: bool) -> list[Pack]:
    """The samples of this rank in its own order: in packs of so many tokens at most, or as rows, of which a micro-batch
    has another number than the script's."""
    lengths, own = batch.samples.lengths.tolist(), batch.samples.own
    of_script = max(map(len, batch.samples.numbers_of(rank, batch.num_batches[rank])), default=0)
    count = (2 if of_script != 2 else 3) if rows else len(own)
    groups: list[list[int]] = [[]]
    for number in own:
        held = sum(lengths[i] for i in groups[-1])
        if groups[-1] and (len(groups[-1]) == count or (not rows and held + lengths[number] > most)):
            groups.append([])
        groups[-1].append(number)
    tokens = {number: sample.cpu().numpy() for number, sample in own.items()}
    packs = []
    for numbers in filter(None, groups):
        pad_to = max(lengths[number] for number in numbers) if rows and len(numbers) > 1 else 0
        micro_batch = MicroBatch(tuple(Slice(number, 0, lengths[number]) for number in numbers), (rank,), pad_to)
        packs.append(build_pack(micro_batch, lambda i: tokens[i][0], device, labels_of=lambda i: tokens[i][1]))
    return packs


def fault_of(
    own: Sequence[Callable[[], Any]],
    planned: Sequence[Callable[[], Any]],
    attending: Callable[[], AbstractContextManager[Any]],
    tolerance: float,
) -> EvenloadError | None:
    """Why the samples of this step are not computed by packs as by the script's own batches; None: they are. On every
    rank the same. Collective.

    Args:
        own: give the loss of each batch of this rank, without gradients.
        planned: those of its packs.
        attending: inside, the model attends to packs.
        tolerance: of a token's logits, where differences are rounding.
    """
    fault = None
    most = [max(counts) for counts in zip(*everyone((len(own), len(planned))), strict=True)]
    try:
        with torch.no_grad():
            losses = [float(run()) for run in own]
            for _ in range(most[0] - len(own)):
                own[-1]()
            with attending():
                of_packs = [float(run()) for run in planned]
                for _ in range(most[1] - len(planned)):
                    (planned or own)[-1]()
    except Exception as error:  # of code that nobody here has seen
        what = "the model or its loss cannot run the samples of the step in packs"
        fault = EvenloadError(what, f"{type(error).__name__}: {error}", STOCK)
    else:
        in_batches, in_packs = sum(losses), sum(of_packs)
        if not abs(in_packs - in_batches) <= tolerance / _OF_TOKENS * sum(map(abs, losses)):
            what = "a loss that depends on more than each sample: on the other rows of its batch, or on their length"
            detail = f"{in_packs:.8g} of the first step's samples in packs, {in_batches:.8g} in its own batches"
            fault = EvenloadError(what, detail, STOCK)
    return next(filter(None, everyone(fault)), None)
