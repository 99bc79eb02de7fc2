"""One forward of a Megatron stage: its loss booked once, and what may differ from pass to pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .batch import Batch, LossFunc, run_batch
from .reduction import Reduction


class Forward:
    """A ``forward_step_func`` of Megatron's schedules for batches that are loaded.

    Args:
        books: whether this rank books losses: one tensor-parallel rank of the last stage does.
    """

    def __init__(self, reduction: Reduction, *, books: bool) -> None:
        self._reduction, self._books = reduction, books

    def __call__(self, batch: Batch, model: Any) -> tuple[Tensor, LossFunc]:
        """(stage output, loss function)."""
        output, loss_func = run_batch(batch, model)

        def counted(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, num_targets, report = loss_func(losses)
            if self._books:
                self._reduction.count(report["loss_sum"], batch.pack.num_targets)
            return loss, num_targets, report

        return output, counted


@contextmanager
def headless(gpt: Any) -> Iterator[None]:
    """The GPTModel returns hidden states: a forward that only fills the prefix needs no logits and no loss."""
    had, gpt.post_process = gpt.post_process, False
    try:
        yield
    finally:
        gpt.post_process = had


@contextmanager
def recomputing(config: Any, layers: int | None) -> Iterator[None]:
    """Forwards inside recompute the first ``layers`` of their stage in backward; None leaves it to the config.

    Args:
        config: that of the GPTModel itself. Megatron reads these fields in the forward only, and its closures keep what
            they were given.
    """
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    had = [getattr(config, name) for name in names]
    wanted = had if layers is None else ["full", "block", layers] if layers else [None, None, None]
    _set(config, names, wanted)
    try:
        yield
    finally:
        _set(config, names, had)


@contextmanager
def reaching_recomputed(gpt: Any) -> Iterator[None]:
    """What the embedding gives needs a gradient, also where its weights are frozen.

    Megatron's checkpoints have a backward only where their input needs a gradient: without this, a recomputed layer
    behind a frozen embedding would leave no gradients, silently.
    """

    def need_gradient(_: Any, __: Any, output: Tensor) -> Tensor:
        return output if output.requires_grad or not torch.is_grad_enabled() else output.detach().requires_grad_()

    hook = gpt.embedding.register_forward_hook(need_gradient) if gpt.pre_process else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def _set(config: Any, names: tuple[str, ...], values: list[Any]) -> None:
    for name, value in zip(names, values, strict=True):
        setattr(config, name, value)
