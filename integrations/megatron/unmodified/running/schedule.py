"""Megatron's own schedule over the packs of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from megatron.core.utils import get_model_config

from .....runtime.attributes import with_attributes
from ..reading.samples import UserPack
from .chunks import is_interleaved, known_shapes
from .forward_step import UserStep


def run_stock(
    stock: Callable[..., Any], step: UserStep, packs: list[UserPack], chunks: Sequence[Any], **rest: Any
) -> Any:
    """Megatron's own schedule over packs."""
    config, interleaved = get_model_config(chunks[0]), is_interleaved(chunks)
    coming = {id(chunk): iter(packs) for chunk in chunks}

    def forward_step(_: Any, chunk: Any, *more: Any) -> tuple[Any, Any]:
        if step.gate:
            step.gate.enter("a micro-batch")
        return step.run(next(coming[id(chunk)]), chunk, *more)

    shapes = known_shapes(packs, config, len(chunks)) if interleaved else nullcontext()
    iterators = [None] * len(chunks) if interleaved else None
    with with_attributes(config, variable_seq_lengths=True), shapes, step.listening():
        return stock(forward_step_func=forward_step, data_iterator=iterators, num_microbatches=len(packs), **rest)
