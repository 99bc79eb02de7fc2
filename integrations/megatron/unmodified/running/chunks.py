"""Megatron's own schedule over the packs of a plan, also where a rank has several chunks of the model.

With virtual pipeline stages Megatron's interleaved schedule runs, and the packs of a step go through all chunks in its
own order. It calls ``forward_step_func`` chunk by chunk, and for each chunk in the order of micro-batches, so the k-th
call for a chunk is for the k-th pack. What else changes:

    batches     each chunk has an iterator or None; all that there are give the same samples, and as many batches are
                taken from each as usual
    number      of packs: the schedule asks for a multiple of its group, or a remainder of at least as many as there
                are stages; dummies fill up
    shapes      of what stages exchange follow from the plan. Megatron's own way, with ``variable_seq_lengths``, is an
                exchange in front of each tensor, which waits for both neighbours; so nothing is exchanged that is not
                exchanged where all micro-batches are of one shape, whatever overlaps
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.utils import get_model_config

from .....runtime.attributes import with_attributes
from ..reading.samples import UserPack
from .forward_step import UserStep
from .trial import FunctionTrial


def chunks_of(model: Any) -> list[Any]:
    """The model chunks of this rank; Megatron takes a list, or one model."""
    return list(model) if isinstance(model, (list, tuple)) else [model]


def is_interleaved(chunks: Sequence[Any]) -> bool:
    """Whether Megatron runs its interleaved schedule; with one virtual stage, too."""
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return len(chunks) > 1 or (virtual is not None and parallel_state.get_pipeline_model_parallel_world_size() > 1)


def round_up_microbatches(num_microbatches: int, group: int, stages: int) -> int:
    """The least number of micro-batches, as many at least, that the interleaved schedule takes.

    Args:
        group: ``microbatch_group_size_per_vp_stage``, at least ``stages``.
        stages: pipeline stages.
    """
    number = max(num_microbatches, group)
    return number + (max(0, stages - number % group) if number % group else 0)


def required_microbatches(interleaved: bool, config: Any, number: int) -> int:
    """The number of micro-batches that Megatron's schedule takes for so many."""
    if not interleaved:
        return number
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return round_up_microbatches(number, config.microbatch_group_size_per_vp_stage, stages)


def received(number: int, chunks: int, group: int, leading: bool) -> list[int]:
    """The micro-batches of the tensors that a rank receives from one neighbour, in order.

    ``leading``: it is the first stage, and receives from the last one; or the last one, of gradients.
    """
    table = get_schedule_table(number, chunks, group)
    return [place for place, chunk in table if chunk > 0 or not leading]


def run_stock(
    stock: Callable[..., Any],
    step: UserStep,
    packs: list[UserPack],
    chunks: Sequence[Any],
    trial: FunctionTrial | None = None,
    **rest: Any,
) -> Any:
    """Megatron's own schedule over packs; what ``step`` raises is kept by a ``trial``, if it is one."""
    config, interleaved = get_model_config(chunks[0]), is_interleaved(chunks)
    coming = {id(chunk): iter(packs) for chunk in chunks}

    def forward_step(_: Any, chunk: Any, *more: Any) -> tuple[Any, Any]:
        if step.gate:
            step.gate.enter("a micro-batch")
        pack = next(coming[id(chunk)])
        run = partial(step.run, pack, chunk, *more)
        return trial.answer(run, pack.pack.num_padded_tokens, config) if trial else run()

    shapes = known_shapes(packs, config, len(chunks)) if interleaved else nullcontext()
    iterators = [None] * len(chunks) if interleaved else None
    with with_attributes(config, variable_seq_lengths=True), shapes, step.listening():
        return stock(forward_step_func=forward_step, data_iterator=iterators, num_microbatches=len(packs), **rest)


def known_shapes(packs: Sequence[UserPack], config: Any, chunks: int) -> AbstractContextManager[None]:
    """Inside, pipeline stages know the shapes of what they receive from the packs of this training call."""
    group, width = config.microbatch_group_size_per_vp_stage, config.hidden_size
    shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
    slots = [pack.pack.num_padded_tokens // shares for pack in packs]
    ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    ahead, behind = (iter(received(len(packs), chunks, group, end)) for end in ends)

    def shapes(_: Any, sent_next: Any, sent_prev: Any, recv_prev: bool, recv_next: bool) -> tuple[Any, Any]:
        first = [slots[next(ahead)], 1, width] if recv_prev else [0, 0, 0]
        return first, [slots[next(behind)], 1, width] if recv_next else [0, 0, 0]

    return with_attributes(P2PCommunicator, _communicate_shapes=shapes)
