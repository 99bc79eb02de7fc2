"""A script's own batches against the same samples as a planned step has them: what two short samples cannot show.

A factor by the number of rows, a model or a loss that treats far places otherwise, a table of positions that ends: the
losses of all batches of this rank, forward only, are compared with those of its samples in packs as long as the plan's
(or in padded rows). Every rank runs as many forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.step_plan import MicroBatch, Slice
from ...runtime.attention.pack import Pack, build_pack
from ...runtime.world.agreement import everyone, rank_and_size
from .conditions import as_if_without_dropout, twin_of
from .planned import TrainerStep
from .planning import StepForm, StepSamples
from .proof import STOCK, tolerance_of
from .stage import attending

_OF_TOKENS = 50.0
"""Times smaller than that of a token's logits is the rounding of a loss of many tokens."""


def own_batches_fault(step: TrainerStep, batch: StepSamples, form: StepForm, most: int) -> EvenloadError | None:
    """Why the script's own batches of this step have another loss than their samples in this form; None: they have the
    same one. On every rank the same. Collective.

    Args:
        batch: their samples.
        most: tokens of a pack at most.
    """
    state, trainer, inner, fault = step.state, step.trainer, step.inner, None
    twin, model = twin_of(trainer), trainer.accelerator.unwrap_model(trainer.model)
    inputs_of, args = batch.inputs_of(form, state.loss), trainer.args

    def loss_of(inputs: dict[str, Any], num_items: Any) -> float:
        copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in inputs.items()}
        with twin.compute_loss_context_manager():
            return float(twin.compute_loss(model, copied, num_items_in_batch=num_items))

    packs = _packs_of(batch, most, args.device, rows=not form.packs)
    own = [partial(loss_of, one.inputs, one.num_items) for one in step.batches]
    planned = [lambda pack=pack: loss_of(inputs_of(pack), step.last.num_items) for pack in packs]
    of_own, of_planned = (max(counts) for counts in zip(*everyone((len(own), len(planned))), strict=True))
    weighed = nullcontext() if state.loss is None else state.loss.in_place(inner)
    try:
        with as_if_without_dropout(inner, args.device), weighed, torch.no_grad():
            losses = _losses(own, of_own)[: len(own)]
            with attending(inner, state.proof.mixers) if form.packs else nullcontext():
                in_packs = sum(_losses(planned or own[-1:], of_planned)[: len(planned)])
    except Exception as error:  # of code that nobody here has seen
        what = "the model or its loss cannot run the samples of the step in packs"
        fault = EvenloadError(what, f"{type(error).__name__}: {error}", STOCK)
    else:
        tolerance = tolerance_of(inner, {torch.bfloat16} if args.bf16 or args.fp16 else set())
        if not abs(in_packs - sum(losses)) <= tolerance / _OF_TOKENS * sum(map(abs, losses)):
            what = "a loss that depends on more than each sample: on the other rows of its batch, or on their length"
            detail = f"{in_packs:.8g} of the first step's samples in packs, {sum(losses):.8g} in its own batches"
            fault = EvenloadError(what, detail, STOCK)
    return next(filter(None, everyone(fault)), None)


def _losses(runs: Sequence[Callable[[], float]], count: int) -> list[float]:
    """What so many runs give, the last one again and again where there are fewer."""
    return [runs[min(number, len(runs) - 1)]() for number in range(count)]


def _packs_of(batch: StepSamples, most: int, device: torch.device, *, rows: bool) -> list[Pack]:
    """The samples of this rank in its own order: in packs of so many tokens at most, or as rows, of which a micro-batch
    has another number than the script's."""
    rank, lengths, own = rank_and_size()[0], batch.samples.lengths.tolist(), batch.samples.own
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
