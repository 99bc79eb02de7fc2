"""One forward of a Megatron stage: its loss booked once, and what may differ from pass to pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...runtime.attributes import with_attributes
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


def recomputing(config: Any, layers: int | None) -> AbstractContextManager[None]:
    """Forwards inside recompute the first ``layers`` of their stage in backward; None leaves it to the config.

    Args:
        config: that of the GPTModel itself. Megatron reads these fields in the forward only, and its closures keep what
            they were given.
    """
    if layers is None:
        return nullcontext()
    granularity, method, number = ("full", "block", layers) if layers else (None, None, None)
    names = {"recompute_granularity": granularity, "recompute_method": method, "recompute_num_layers": number}
    return with_attributes(config, **names)


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
